"""The sources of a session, each standing alone: one that fails takes nobody with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dsagent.agent.errors import CANNOT_ATTACH, DsagentError, SourceUnavailable
from dsagent.agent.facts import (
    Event,
    Readings,
    Source,
    SourceStatus,
    Target,
)
from dsagent.agent.procfs import escape
from dsagent.agent.sources.proc import ProcSource
from dsagent.agent.sources.stall import Progress, StallSource
from dsagent.agent.sources.steps import StepsSource

if TYPE_CHECKING:
    from dsagent.agent.sources.kernel import KernelSource


class Feed:
    """One source and how it fares."""

    def __init__(self, name: str, make: Callable[[], Source]) -> None:
        self.name = name
        self._make = make
        self._source: Source | None = None
        self._final: SourceStatus | None = None  # set once the source no longer runs
        self.poll_cpu_ns = 0

    @property
    def runs(self) -> bool:
        return self._source is not None

    def start(self) -> None:
        try:
            source = self._make()
            source.start()
        except SourceUnavailable as reason:
            self._final = SourceStatus(self.name, "unavailable", escape(str(reason)))
        except Exception as error:  # noqa: BLE001 - any source may fail, in its own way
            self._final = SourceStatus(self.name, "failed", _reason(error))
        else:
            self._source = source

    def poll(self, now_ns: int) -> Readings | None:
        """None where the source does not run; one that raises runs no more, and an event tells."""
        if self._source is None:
            return None
        began_ns = time.thread_time_ns()
        try:
            return self._source.poll(now_ns)
        except Exception as error:  # noqa: BLE001 - any source may fail, in its own way
            self._end("failed", _reason(error))
            message = f"source {self.name} failed: {_reason(error)}"
            return Readings(events=[Event("source.failed", now_ns, message)])
        finally:
            self.poll_cpu_ns += time.thread_time_ns() - began_ns

    def switch_off(self, reason: str) -> None:
        self._end("unavailable", reason)

    def _end(self, state: str, reason: str) -> None:
        source, self._source = self._source, None
        if source is None:
            return
        last = source.status()
        self._final = replace(
            last, state="failed" if state == "failed" else "unavailable", reason=reason
        )
        source.stop()

    def status(self) -> SourceStatus:
        if self._source is not None:
            return self._source.status()
        return self._final or SourceStatus(self.name, "unavailable", "not started")

    def stop(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            self._final = source.status()
            source.stop()


class Feeds:
    """All sources of one target, in the order they are polled: the steps first, so that the
    facts polled after them reach beyond their ends."""

    def __init__(self, target: Target) -> None:
        self.steps = StepsSource(target)
        self._target = target
        self._kernel: KernelSource | None = None
        self._failed: list[str] = []
        self.lag_ns = 0  # of the loop that polls them all
        self.all = (
            Feed("steps", lambda: self.steps),
            Feed("kernel", self._make_kernel),
            Feed("proc", lambda: ProcSource(target, lambda: self.steps.pids)),
            Feed("stall", lambda: StallSource(target, self._progress)),
            Feed("nvml", self._make_nvml),
        )

    def _make_kernel(self) -> Source:
        from dsagent.agent.sources.kernel import KernelSource

        self._kernel = KernelSource(self._target, self.steps.new_step_words())
        return self._kernel

    def _make_nvml(self) -> Source:
        from dsagent.agent.sources.nvml import NvmlSource

        return NvmlSource(self._target)

    def _progress(self) -> Progress:
        return Progress(
            running=tuple(self.steps.running()),
            step_p99_ns=self.steps.step_p99_ns(),
            last_step_end_ns=self.steps.last_step_end_ns,
            oldest_open_ns=self.steps.oldest_open_ns(),
        )

    def start(self) -> None:
        """Raises DsagentError (exit 3) without steps: then there is nothing to account for."""
        for feed in self.all:
            feed.start()
            if feed.name == "steps" and not feed.runs:
                reason = feed.status().reason
                raise DsagentError(f"cannot attach: {reason}", exit_code=CANNOT_ATTACH)

    def poll(self, now_ns: int) -> list[Readings]:
        """What each source that runs has brought."""
        brought = []
        for feed in self.all:
            readings = feed.poll(now_ns)
            if readings is None:
                continue
            brought.append(readings)
            if not feed.runs:
                self._failed.append(feed.name)
            if feed.name == "steps" and self._kernel is not None:
                for pid, address in self.steps.new_step_words().items():
                    self._kernel.set_step_word(pid, address)
        return brought

    def take_failed(self) -> list[str]:
        """Names of the sources that have failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def kernel_cost_ns(self) -> int:
        """What the BPF programs have cost: the source's cost less what its polls took of us."""
        kernel = self.feed("kernel")
        return max(0, kernel.status().cost_ns - kernel.poll_cpu_ns)

    def feed(self, name: str) -> Feed:
        return next(feed for feed in self.all if feed.name == name)

    def statuses(self) -> tuple[SourceStatus, ...]:
        statuses = (feed.status() for feed in self.all)
        return tuple(replace(status, lag_ns=status.lag_ns + self.lag_ns) for status in statuses)

    def stop(self) -> None:
        for feed in self.all:
            feed.stop()


def _reason(error: Exception) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = (
        ""
        if frame is None
        else f" ({_module(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno})"
    )
    return escape(f"{type(error).__name__}: {error}{where}")


def _module(path: str) -> str:
    return path.rsplit("/", 1)[-1]
