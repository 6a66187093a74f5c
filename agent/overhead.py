"""What watching costs the target, as far as the agent can know it while it runs.

Three costs: the BPF programs (self-timed, in the kernel), the hooks that write
the rings, which run in the engine's loop, and the agent's own CPU time where
the target wanted the CPU. The last is seen by the kernel source: time in which
a thread of the target was runnable and the agent ran instead; where that source
is off, all CPU time of the agent on CPUs that the target may use counts.
On/off experiments are the benchmark's business.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from dsagent.agent import procfs
from dsagent.agent.facts import Facts, Kind
from dsagent.agent.privileges import INITIAL_PID_NAMESPACE, pid_namespace

# What writing a step of b shares costs the loop, rounded up from the benchmark's table.
HOOK_NS = 8_000
HOOK_NS_A_SHARE = 200

WINDOW_NS = 5_000_000_000
NICENESS = 10  # a tenth of a contended CPU at most: enough for us, little for the target


@dataclass(frozen=True, slots=True)
class Costs:
    """Totals at one moment."""

    now_ns: int
    agent_cpu_ns: int
    kernel_ns: int = 0
    hooks_ns: int = 0
    displaced_ns: int = 0


def hooks_ns(steps: int, shares: int) -> int:
    return steps * HOOK_NS + shares * HOOK_NS_A_SHARE


def cpu_overlap_ratio(agent_cpus: frozenset[int], target_cpus: frozenset[int]) -> float:
    """The share of the agent's CPU time that is taken from CPUs the target may use."""
    return len(agent_cpus & target_cpus) / len(agent_cpus) if agent_cpus else 1.0


def give_way() -> None:
    """The target goes first where both want a CPU."""
    for tid in procfs.threads(os.getpid()):
        try:
            if os.getpriority(os.PRIO_PROCESS, tid) < NICENESS:
                os.setpriority(os.PRIO_PROCESS, tid, NICENESS)
        except ProcessLookupError:
            continue  # the thread has ended


class OverheadMeter:
    """Ratios over the last window of 5 s, and over all of the time attached."""

    def __init__(self, pid: int, now_ns: int, *, sees_displacement: bool) -> None:
        target_cpus = _affinity(pid)
        self._target_cpus = max(1, len(target_cpus))
        self._overlap_ratio = cpu_overlap_ratio(_affinity(0), target_cpus)
        self._own_pid = os.getpid()
        # Culprits outside the target are named by the initial namespace's pids: elsewhere we
        # would not find ourselves among them.
        self.sees_displacement = sees_displacement and pid_namespace() == INITIAL_PID_NAMESPACE
        self._displaced_ns = 0
        self._first = self._last = self._window = Costs(now_ns, time.process_time_ns())
        self.window_ratio: float | None = None  # None until the first window is over
        self.window_kernel_ratio = 0.0

    def add_facts(self, facts: Facts) -> None:
        """Kernel facts: those in which a thread of the target waited because we ran."""
        if len(facts):
            ours = (facts["kind"] == Kind.RUNQUEUE) & (facts["culprit_pid"] == self._own_pid)
            self._displaced_ns += int(facts["ns"][ours].sum())

    def update(self, now_ns: int, kernel_ns: int, hooks_ns: int) -> bool:
        """Takes totals since attaching; True when a window ended and `window_ratio` is new."""
        self._last = Costs(now_ns, time.process_time_ns(), kernel_ns, hooks_ns, self._displaced_ns)
        if now_ns - self._window.now_ns < WINDOW_NS:
            return False
        self.window_ratio = self._ratio(self._window, self._last)
        self.window_kernel_ratio = self._kernel_ratio(self._window, self._last)
        self._window = self._last
        return True

    def _ratio(self, begin: Costs, end: Costs) -> float:
        """The BPF programs and we take a share of the CPUs that the target may use; the hooks
        delay its loop one for one."""
        elapsed_ns = max(1, end.now_ns - begin.now_ns)
        taken_ns = float(end.kernel_ns - begin.kernel_ns)
        if self.sees_displacement:
            taken_ns += end.displaced_ns - begin.displaced_ns
        else:
            taken_ns += (end.agent_cpu_ns - begin.agent_cpu_ns) * self._overlap_ratio
        hooks_ns = end.hooks_ns - begin.hooks_ns
        return taken_ns / (elapsed_ns * self._target_cpus) + hooks_ns / elapsed_ns

    def _kernel_ratio(self, begin: Costs, end: Costs) -> float:
        """What the BPF programs alone take, and what leaving them out would save."""
        elapsed_ns = max(1, end.now_ns - begin.now_ns)
        return (end.kernel_ns - begin.kernel_ns) / (elapsed_ns * self._target_cpus)

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
