"""The sources of a session, each standing alone: one that fails takes nobody with it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from dsagent.agent.errors import CANNOT_ATTACH, DsagentError, SourceUnavailable
from dsagent.agent.facts import (
    Event,
    Readings,
    Source,
    SourceState,
    SourceStatus,
    Target,
)
from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import escape
from dsagent.agent.probes import Tier
from dsagent.agent.session.guard import attempt, reason_of
from dsagent.agent.sources.outside.source import OutsideSource
from dsagent.agent.sources.proc import ProcSource
from dsagent.agent.sources.stall import Progress, StallSource
from dsagent.agent.sources.steps import StepsSource
from dsagent.agent.sources.tallies import TallySource

if TYPE_CHECKING:
    from dsagent.agent.sources.cpu_clock import CpuClockSource
    from dsagent.agent.sources.kernel import KernelSource
    from dsagent.agent.sources.py_spy import PySpySource


# Those that a session can do without.
DISPENSABLE = ("kernel", "proc", "stall", "nvml")


class Feed:
    """One source and how it fares. One that raises, in whatever method, runs no more."""

    def __init__(self, name: str, make: Callable[[], Source]) -> None:
        self.name = name
        self._make = make
        self._source: Source | None = None
        self._last = SourceStatus(name, "unavailable", "not started")
        self._before = self._last  # its counts up to when it was started again
        self._untold = ""  # why it failed, until an event has told it
        self.poll_cpu_ns = 0

    @property
    def runs(self) -> bool:
        return self._source is not None

    def start(self) -> None:
        """Also again, after `switch_off`: what it has lost and cost so far is kept."""
        self._before = self._last
        try:
            source = self._make()
            source.start()
        except SourceUnavailable as reason:
            self._last = replace(self._last, state="unavailable", reason=escape(str(reason)))
        except Exception as error:  # noqa: BLE001 - any source may fail, in its own way
            self._last = replace(self._last, state="failed", reason=reason_of(error))
        else:
            self._source = source

    def poll(self, now_ns: int) -> Readings | None:
        """None where the source does not run; that it has failed, an event tells once."""
        readings = None
        if self._source is not None:
            began_ns = time.thread_time_ns()
            readings, why = attempt(functools.partial(self._source.poll, now_ns))
            self.poll_cpu_ns += time.thread_time_ns() - began_ns
            if why:
                self.fail(why)
        if self._untold:
            message = f"source {self.name} failed: {self._untold}"
            self._untold = ""
            return Readings(events=[Event("source.failed", now_ns, message)])
        return readings

    def fail(self, why: str) -> None:
        if self._source is not None:
            self._untold = why
            self._end("failed", why)

    def switch_off(self, reason: str) -> None:
        self._end("unavailable", reason)

    def leave_out(self, reason: str) -> None:
        """Instead of starting it."""
        self._last = SourceStatus(self.name, "unavailable", reason)

    def _end(self, state: SourceState, reason: str) -> None:
        source, self._source = self._source, None
        if source is None:
            return
        self._look(source)
        _, why = attempt(source.stop)
        reason = f"{reason}; and it did not stop: {why}" if why else reason
        self._last = replace(self._last, state=state, reason=reason)

    def _look(self, source: Source) -> str:
        """Renews what is known of its state; why that failed, if it did."""
        status, why = attempt(source.status)
        if status is not None:
            self._last = replace(
                status,
                dropped=self._before.dropped + status.dropped,
                cost_ns=self._before.cost_ns + status.cost_ns,
            )
        return why

    def status(self) -> SourceStatus:
        if self._source is not None and (why := self._look(self._source)):
            self.fail(why)
        return self._last

    def stop(self) -> None:
        """Ends it as it is: its state stays what it was."""
        source, self._source = self._source, None
        if source is None:
            return
        for why in filter(None, (self._look(source), attempt(source.stop)[1])):
            self._last = replace(self._last, state="failed", reason=why)


class Feeds:
    """All sources of one target, in the order they are polled: the steps first, so that the
    facts polled after them reach beyond their ends. Those named in `without` are never made."""

    def __init__(
        self,
        target: Target,
        without: Collection[str] = (),
        receiver: Source | None = None,
        *,
        tier: Tier = "default",
        profiles_within: float | None = None,
    ) -> None:
        """`receiver`: one more source, that only some sessions have. `tier`: of the kernel's.
        `profiles_within`: --max-overhead where stacks are to be sampled, None where not."""
        rings = StepsSource(target)
        self.steps = OutsideSource(target) if target.engine == "http" else rings
        self._target = target
        self._without = without
        self._kernel: KernelSource | None = None
        self._kernel_tier: Tier = tier
        self._kernel_why = ""
        self._step_words: dict[int, int] = {}
        self._failed: list[str] = []
        self.lag_ns = 0  # of the loop that polls them all
        # The bundled engine has neither experts nor drafts.
        tallies = Feed("experts", lambda: TallySource(rings.take_tallies))
        tallied = () if target.engine in ("reference", "http") else (tallies,)
        served = Feed("served", self._make_served)
        spoken = () if target.engine == "reference" else (served,)
        received = () if receiver is None else (Feed(receiver.name, lambda: receiver),)
        self._sampler: PySpySource | None = None
        self._cpu_clock: CpuClockSource | None = None
        self._profiles_within = profiles_within
        sampled = (Feed("profiles", self._make_sampler), Feed("native", self._make_cpu_clock))
        self.all: tuple[Feed, ...] = (
            Feed("steps", lambda: self.steps),
            Feed("kernel", self._make_kernel),
            Feed("proc", lambda: ProcSource(target, lambda: self.steps.pids)),
            Feed("stall", lambda: StallSource(target, self._progress)),
            Feed("nvml", self._make_nvml),
            *tallied,
            *spoken,
            *received,
            *(sampled if profiles_within is not None else ()),
        )

    def _make_kernel(self) -> Source:
        from dsagent.agent.sources.kernel import KernelSource

        # Later than at the beginning, pids may have been given to others.
        children = procfs.descendants(self._target.pid, procfs.parents())
        words = self._step_words | self.steps.new_step_words()
        self._step_words = {pid: at for pid, at in words.items() if pid in self.steps.pids}
        self._kernel = KernelSource(
            replace(self._target, children=children),
            self._step_words,
            tier=self._kernel_tier,
            why_tier=self._kernel_why,
        )
        return self._kernel

    def _make_served(self) -> Source:
        from dsagent.agent.sources.served import ServedSource

        steps = self.steps
        if isinstance(steps, OutsideSource):
            return ServedSource(self._target, lambda: steps.pids, steps.counted)
        return ServedSource(self._target, lambda: steps.pids)

    def _make_nvml(self) -> Source:
        from dsagent.agent.sources.nvml import NvmlSource

        return NvmlSource(self._target)

    def _make_sampler(self) -> Source:
        from dsagent.agent.sources.py_spy import PySpySource

        assert self._profiles_within is not None
        self._sampler = PySpySource(self._target, lambda: self.steps.pids, self._profiles_within)
        return self._sampler

    def _make_cpu_clock(self) -> Source:
        from dsagent.agent.sources.cpu_clock import CpuClockSource

        assert self._profiles_within is not None
        self._cpu_clock = CpuClockSource(
            self._target, lambda: self.steps.pids, self._profiles_within
        )
        return self._cpu_clock

    def tell_overhead(self, ratio: float, now_ns: int) -> None:
        """What watching has cost over the last window: sampling takes what that leaves, the CPU
        clock first, which takes little."""
        native = self._cpu_clock
        if self._sampler is not None:
            ratio -= self._sampler.pace(ratio, now_ns, 0.0 if native is None else native.ratio)
        if native is not None:
            native.pace(ratio)

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
            if feed.name in self._without:
                feed.leave_out("switched off by --without")
                continue
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
            if feed.name == "steps":
                self._tell_step_words()
                self._share_tags()
        return brought

    def _tell_step_words(self) -> None:
        """The kernel source tags its facts with the step that these words name."""
        kernel = self.feed("kernel")
        if not kernel.runs or self._kernel is None:
            return
        new = self.steps.new_step_words()
        self._step_words |= new
        for pid, address in new.items():
            _, why = attempt(functools.partial(self._kernel.set_step_word, pid, address))
            if why:
                kernel.fail(why)

    def _share_tags(self) -> None:
        """From outside, a step's number is what the kernel source is to tag with."""
        if isinstance(self.steps, OutsideSource):
            runs = self._kernel is not None and self.feed("kernel").runs
            self.steps.tag(self._kernel.loaded if runs and self._kernel else None)

    def kernel_look_at(self, tier: Tier, why: str) -> None:
        """The kernel source has that tier from now on, and is started if it is off; `why` becomes
        part of its status."""
        self._kernel_tier, self._kernel_why = tier, why
        kernel = self.feed("kernel")
        if not kernel.runs:
            kernel.start()
        elif self._kernel is not None:
            _, failed = attempt(functools.partial(self._kernel.set_tier, tier, why))
            if failed:
                kernel.fail(failed)

    def kernel_off(self, why: str) -> None:
        self.feed("kernel").switch_off(why)

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
