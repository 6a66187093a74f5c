"""What watching costs the target, and what follows: looking more rarely, or at less."""

from __future__ import annotations

import time

from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.facts import Event, Facts
from dsagent.agent.probes import Tier
from dsagent.agent.session.feeds import Feeds
from dsagent.agent.session.overhead import OverheadMeter, Window, hooks_ns
from dsagent.agent.session.report import Counts
from dsagent.agent.session.stepping import Stepping

TICK_NS = 200_000_000
MAX_TICK_NS = 800_000_000
TICK_CPU_RATIO = 0.01  # ticks come further apart rather than take more of a core than this


class Thrift:
    """Of one attachment, from when its sources run. The session's thread only."""

    def __init__(
        self, feeds: Feeds, accountant: Accountant, pid: int, max_ratio: float, tier: Tier
    ) -> None:
        self._feeds = feeds
        self._accountant = accountant
        self._stepping = Stepping(feeds, max_ratio, tier)
        self._least_tick_ns = TICK_NS
        self._tick_cpu_ns = 0.0
        self.overhead = OverheadMeter(
            pid, time.monotonic_ns(), sees_displacement=feeds.feed("kernel").runs
        )

    def ticked(self, cpu_ns: int) -> int:
        """A tick took so much CPU time; returns when to tick again, in ns from now."""
        self._tick_cpu_ns += (cpu_ns - self._tick_cpu_ns) / 8
        return min(MAX_TICK_NS, max(self._least_tick_ns, round(self._tick_cpu_ns / TICK_CPU_RATIO)))

    def add_facts(self, facts: Facts) -> None:
        self.overhead.add_facts(facts)

    def measure(self, counts: Counts, now_ns: int) -> bool:
        """Whether a window of the meter has ended."""
        hooks = hooks_ns(counts.steps, counts.shares)
        return self.overhead.update(now_ns, self._feeds.kernel_cost_ns(), hooks)

    def keep(self, counts: Counts, now_ns: int) -> list[Event]:
        """Measures, and acts on it after each window; what is to be told of that."""
        if not self.measure(counts, now_ns):
            return []
        assert self.overhead.window is not None
        return self._keep_within_budget(self.overhead.window, now_ns)

    def _keep_within_budget(self, window: Window, now_ns: int) -> list[Event]:
        kernel = self._feeds.feed("kernel")
        ran = kernel.runs
        self._feeds.tell_overhead(window.ratio, now_ns)
        action, events = self._stepping.judge(window, now_ns)
        if action in ("step down", "step up"):
            self._accountant.looks_at_all_but(now_ns, self._stepping.not_looked_at)
        if action in ("step up", "relax"):
            self._least_tick_ns = max(self._least_tick_ns // 2, TICK_NS)
        elif action != "go on":
            self._least_tick_ns = min(2 * self._least_tick_ns, MAX_TICK_NS)
        if kernel.runs != ran:
            self._kernel_changed()
        return events

    def look_into_kernel(self, why_not: str | None) -> None:
        """From now on, or not for that reason; never against what the budget allows."""
        kernel, now_ns = self._feeds.feed("kernel"), time.monotonic_ns()
        if kernel.runs and why_not is not None:
            self._feeds.kernel_off(why_not)
            self._accountant.looks_at_all_but(now_ns, ("kernel",))
            self._kernel_changed()
        elif not kernel.runs and why_not is None and self._stepping.look_again():
            self._accountant.looks_at_all_but(now_ns, self._stepping.not_looked_at)
            self._kernel_changed()

    def _kernel_changed(self) -> None:
        runs = self._feeds.feed("kernel").runs
        self.overhead.see_displacement(runs)
        (self._accountant.source_on if runs else self._accountant.source_off)("kernel")
