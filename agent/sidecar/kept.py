"""Sinks that behave otherwise than within one attachment: kept through several, or tried again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from dsagent.agent.errors import DsagentError
from dsagent.agent.sidecar.backoff import SECOND_NS, Backoff
from dsagent.agent.sinks.base import Explained, Sink, SinkStatus


class Kept:
    """A sink that goes on when the attachment ends; `end` stops it."""

    def __init__(self, sink: Sink) -> None:
        self.name = sink.name
        self._sink = sink
        self._started = False

    def start(self) -> None:
        if not self._started:
            self._sink.start()
            self._started = True

    def take(self, batch: Explained) -> None:
        self._sink.take(batch)

    def status(self) -> SinkStatus:
        return self._sink.status()

    def stop(self, deadline_s: float) -> None:
        """It goes on."""

    def end(self, deadline_s: float) -> None:
        if self._started:
            self._started = False
            self._sink.stop(deadline_s)


class Retried:
    """A sink that cannot begin, or that has ended (a full disk), is made anew after a while: a
    minute at first, ten at most. Until then what it is given is dropped, and counted as such."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        *,
        first_ns: int = 60 * SECOND_NS,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.name = name
        self._make = make
        self._now_ns = now_ns
        self._backoff = Backoff(first_ns, 10 * first_ns)
        self._sink: Sink | None = None
        self._before = SinkStatus(name)  # of those that have ended
        self._stopped = False

    def start(self) -> None:
        """Never raises: what is in the way is told by `status`, and tried again."""
        sink = self._make()
        try:
            sink.start()
        except DsagentError as error:
            self._give_up(str(error))
        else:
            self._sink = sink

    def take(self, batch: Explained) -> None:
        if self._sink is not None and self._sink.status().ended:
            sink, self._sink = self._sink, None
            sink.stop(0.0)
            status = sink.status()
            self._before = _sum(self._before, status)
            self._give_up(status.reason)
        if self._sink is None and not self._stopped and self._backoff.due(self._now_ns()):
            self.start()
        if self._sink is not None:
            self._sink.take(batch)
        else:
            items = len(batch.accounts) + len(batch.steps)
            self._before = replace(self._before, dropped=self._before.dropped + items)

    def _give_up(self, why: str) -> None:
        wait_s = self._backoff.failed(self._now_ns()) // SECOND_NS
        self._before = replace(
            self._before, reason=why, notice=f"{why}; tried again in {wait_s} s at the earliest"
        )

    def status(self) -> SinkStatus:
        if self._sink is None:
            return self._before
        status = self._sink.status()
        return replace(_sum(self._before, status), ended=False, notice=status.notice)

    def stop(self, deadline_s: float) -> None:
        self._stopped = True
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.stop(deadline_s)
            self._before = _sum(self._before, sink.status())


def _sum(one: SinkStatus, other: SinkStatus) -> SinkStatus:
    return replace(
        other,
        sent=one.sent + other.sent,
        acknowledged=one.acknowledged + other.acknowledged,
        failed=one.failed + other.failed,
        dropped=one.dropped + other.dropped,
        reason=other.reason or one.reason,
    )
