"""What watching costs the target, as far as the agent can know it while it runs.

Three costs: the BPF programs (self-timed, in the kernel), the agent's own CPU
where the target could have used it, and the hooks that write the rings, which
run in the engine's loop. The first two take a share of the CPUs that the
target may use; the third delays the loop one for one. On/off experiments are
the benchmark's business.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

# What writing a step of b shares costs the loop, rounded up from the benchmark's table.
HOOK_NS = 8_000
HOOK_NS_A_SHARE = 200

WINDOW_NS = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Totals at one moment."""

    now_ns: int
    agent_cpu_ns: int
    kernel_ns: int
    hooks_ns: int


def hooks_ns(steps: int, shares: int) -> int:
    return steps * HOOK_NS + shares * HOOK_NS_A_SHARE


def cpu_overlap_ratio(agent_cpus: frozenset[int], target_cpus: frozenset[int]) -> float:
    """The share of the agent's CPU time that is taken from CPUs the target may use."""
    return len(agent_cpus & target_cpus) / len(agent_cpus) if agent_cpus else 1.0


class OverheadMeter:
    """Ratios over the last window of 5 s, and over all of the time attached."""

    def __init__(self, pid: int, agent_cpu_ns: Callable[[], int], now_ns: int) -> None:
        self._agent_cpu_ns = agent_cpu_ns
        target_cpus = _affinity(pid)
        self._target_cpus = max(1, len(target_cpus))
        self._overlap_ratio = cpu_overlap_ratio(_affinity(0), target_cpus)
        self._first = self._last = self._window = Costs(now_ns, agent_cpu_ns(), 0, 0)
        self.window_ratio: float | None = None  # None until the first window is over

    def update(self, now_ns: int, kernel_ns: int, hooks_ns: int) -> bool:
        """Takes totals since attaching; True when a window ended and `window_ratio` is new."""
        self._last = Costs(now_ns, self._agent_cpu_ns(), kernel_ns, hooks_ns)
        if now_ns - self._window.now_ns < WINDOW_NS:
            return False
        self.window_ratio = self._ratio(self._window, self._last)
        self._window = self._last
        return True

    def _ratio(self, begin: Costs, end: Costs) -> float:
        elapsed_ns = max(1, end.now_ns - begin.now_ns)
        cpu_ns = (end.agent_cpu_ns - begin.agent_cpu_ns) * self._overlap_ratio
        cpu_ns += end.kernel_ns - begin.kernel_ns
        loop_ns = end.hooks_ns - begin.hooks_ns
        return cpu_ns / (elapsed_ns * self._target_cpus) + loop_ns / elapsed_ns

    @property
    def ratio(self) -> float:
        """Of the target's time, since attaching."""
        return self._ratio(self._first, self._last)

    @property
    def agent_cpu_ratio(self) -> float:
        """The agent's own CPU time since attaching, of one core."""
        elapsed_ns = max(1, self._last.now_ns - self._first.now_ns)
        return (self._last.agent_cpu_ns - self._first.agent_cpu_ns) / elapsed_ns


def _affinity(pid: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (ProcessLookupError, PermissionError):
        return frozenset(range(os.cpu_count() or 1))
