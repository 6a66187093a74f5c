"""What became of everything that was to be delivered, counted once each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

from dsagent.agent.sinks.base import SinkStatus

# Never sent.
WhyDropped = Literal[
    "cannot_encode",  # numbers or text that OTLP cannot hold
    "queue_full",  # more than the back end takes
    "steps_given_up",  # steps that could not be held until their requests had ended
    "not_stored",  # the disk took it not, and neither did the memory
    "damaged",  # on disk, not what had been written; at least one item each
    "too_old",  # on disk for longer than any back end would take it
    "ended",  # still waiting at the end, and nowhere to leave it
]
# Sent, and not taken.
WhyFailed = Literal["refused", "rejected", "unreachable", "no_answer"]


class DeliveryLedger:
    """Counts of one kind of items. Every item that was made, or left by an earlier run, is at any
    moment in exactly one of: queued (with what is on its way), acknowledged, failed, dropped.
    Any thread may call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._made = 0
        self._recovered = 0
        self._acknowledged = 0
        self._failed: dict[str, int] = {}
        self._dropped: dict[str, int] = {}
        self._reason = ""
        self._notice = ""
        self._closed = False

    def made(self, items: int) -> None:
        """From now on they are queued, until something else is said of them."""
        with self._lock:
            self._made += items

    def recovered(self, items: int) -> None:
        """An earlier run has left them."""
        with self._lock:
            self._recovered += items

    def answered(self, acknowledged: int, failed: int, why: WhyFailed, reason: str) -> None:
        """Of one body; after `close`, it has been counted already."""
        with self._lock:
            if self._closed:
                return
            self._acknowledged += acknowledged
            if failed:
                self._failed[why] = self._failed.get(why, 0) + failed
            self._reason = reason or self._reason

    def dropped(self, items: int, why: WhyDropped, reason: str = "") -> None:
        """`reason` is shown unless a failure has given one."""
        if not items:
            return
        with self._lock:
            self._dropped[why] = self._dropped.get(why, 0) + items
            self._reason = self._reason or reason

    def notice(self, line: str) -> None:
        with self._lock:
            self._notice = line

    def trouble(self, reason: str) -> None:
        """Why nothing goes out for now."""
        with self._lock:
            self._reason = reason

    def close(self, unanswered: int, *, is_kept: bool) -> None:
        """Nothing is counted as answered any more. `unanswered`: items on their way; what else
        is queued stays so if it `is_kept` on disk."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if is_kept:
                return
            if unanswered:
                self._failed["no_answer"] = self._failed.get("no_answer", 0) + unanswered
                self._reason = self._reason or "no answer by the end"
            if left := self._queued():
                self._dropped["ended"] = self._dropped.get("ended", 0) + left

    def _queued(self) -> int:
        gone = self._acknowledged + sum(self._failed.values()) + sum(self._dropped.values())
        return self._made + self._recovered - gone

    def status(self) -> SinkStatus:
        with self._lock:
            failed = sum(self._failed.values())
            return SinkStatus(
                self._name,
                sent=self._acknowledged + failed,
                acknowledged=self._acknowledged,
                failed=failed,
                dropped=sum(self._dropped.values()),
                reason=self._reason,
                made=self._made,
                recovered=self._recovered,
                queued=self._queued(),
                lost={**self._failed, **self._dropped},
                notice=self._notice,
            )


def summed(name: str, parts: Sequence[SinkStatus]) -> SinkStatus:
    """One status of a sink with several kinds of items."""
    lost: dict[str, int] = {}
    for part in parts:
        for why, items in part.lost.items():
            lost[why] = lost.get(why, 0) + items
    return SinkStatus(
        name,
        sent=sum(part.sent for part in parts),
        acknowledged=sum(part.acknowledged for part in parts),
        failed=sum(part.failed for part in parts),
        dropped=sum(part.dropped for part in parts),
        reason=next((part.reason for part in parts if part.reason), ""),
        made=sum(part.made or 0 for part in parts),
        recovered=sum(part.recovered for part in parts),
        queued=sum(part.queued for part in parts),
        lost=lost,
        parts=tuple(parts),
        notice=next((part.notice for part in parts if part.notice), ""),
    )
