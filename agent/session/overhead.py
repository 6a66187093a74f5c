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
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.facts import Facts, Kind
from dsagent.agent.host import procfs
from dsagent.agent.host.privileges import INITIAL_PID_NAMESPACE, pid_namespace

# What writing a step of b shares costs the loop, rounded up from the benchmark's table.
HOOK_NS = 5_000
HOOK_NS_A_SHARE = 160

WINDOW_NS = 5_000_000_000
NICENESS = 10  # a tenth of a contended CPU at most: enough for us, little for the target


@dataclass(frozen=True, slots=True)
class Costs:
    """Totals at one moment."""

    now_ns: int
    agent_cpu_ns: int
    kernel_ns: int = 0
    hooks_ns: int = 0
    taken_ns: float = 0.0  # by us from the target: its waits for us, else our CPU time
    switches: int = 0  # of the whole machine


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time, as ratios of the target's time. `ratio` is the sum of the other three."""

    ratio: float
    kernel_ratio: float  # the BPF programs
    agent_ratio: float  # our own CPU time, as far as it is the target's loss
    hooks_ratio: float
    switches_per_s: float  # of the whole machine: what the programs' cost follows


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
        self._displaced_ns = 0
        # Culprits outside the target are named by the initial namespace's pids: elsewhere we
        # would not find ourselves among them.
        self._would_see = pid_namespace() == INITIAL_PID_NAMESPACE
        self.sees_displacement = sees_displacement and self._would_see
        self._children_ns = _children_ns()
        self._first = self._last = self._begin = Costs(
            now_ns, time.process_time_ns() + self._children_ns, switches=_switches()
        )
        self.window: Window | None = None  # None until the first is over

    def see_displacement(self, kernel_runs: bool) -> None:
        """The kernel source has been switched off, or on again."""
        self.sees_displacement = kernel_runs and self._would_see

    def add_facts(self, facts: Facts) -> None:
        """Kernel facts: those in which a thread of the target waited because we ran."""
        if len(facts):
            ours = (facts["kind"] == Kind.RUNQUEUE) & (facts["culprit_pid"] == self._own_pid)
            self._displaced_ns += int(facts["ns"][ours].sum())

    def update(self, now_ns: int, kernel_ns: int, hooks_ns: int) -> bool:
        """Takes totals since attaching; True when a window ended and `window` is new."""
        ended = now_ns - self._begin.now_ns >= WINDOW_NS
        own_ns, children_ns = time.process_time_ns(), _children_ns()
        cpu_ns = own_ns + children_ns
        if self.sees_displacement:
            # Of our children the kernel source does not know that they are ours.
            helped_ns = children_ns - self._children_ns
            taken_ns = self._displaced_ns + helped_ns * self._overlap_ratio
        else:
            taken_ns = (cpu_ns - self._last.agent_cpu_ns) * self._overlap_ratio
        self._children_ns = children_ns
        self._displaced_ns = 0
        self._last = Costs(
            now_ns,
            cpu_ns,
            kernel_ns,
            hooks_ns,
            self._last.taken_ns + taken_ns,
            _switches() if ended else 0,
        )
        if ended:
            self.window = self._between(self._begin, self._last)
            self._begin = self._last
        return ended

    def _between(self, begin: Costs, end: Costs) -> Window:
        """The BPF programs and we take a share of the CPUs that the target may use; the hooks
        delay its loop one for one."""
        elapsed_ns = max(1, end.now_ns - begin.now_ns)
        cpus_ns = elapsed_ns * self._target_cpus
        kernel_ratio = (end.kernel_ns - begin.kernel_ns) / cpus_ns
        agent_ratio = (end.taken_ns - begin.taken_ns) / cpus_ns
        hooks_ratio = (end.hooks_ns - begin.hooks_ns) / elapsed_ns
        return Window(
            kernel_ratio + agent_ratio + hooks_ratio,
            kernel_ratio,
            agent_ratio,
            hooks_ratio,
            1e9 * max(0, end.switches - begin.switches) / elapsed_ns,
        )

    @property
    def ratio(self) -> float:
        """Of the target's time, since attaching."""
        return self._between(self._first, self._last).ratio

    @property
    def agent_cpu_ratio(self) -> float:
        """The agent's own CPU time since attaching, of one core."""
        elapsed_ns = max(1, self._last.now_ns - self._first.now_ns)
        return (self._last.agent_cpu_ns - self._first.agent_cpu_ns) / elapsed_ns


def _children_ns() -> int:
    """CPU time of the children that have ended: py-spy, mostly."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round((used.ru_utime + used.ru_stime) * 1e9)


def _affinity(pid: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (ProcessLookupError, PermissionError):
        return frozenset(range(os.cpu_count() or 1))


def _switches() -> int:
    """Of all CPUs since boot."""
    for line in procfs.read_bytes(Path("/proc/stat")).splitlines():
        if line.startswith(b"ctxt "):
            return int(line.split()[1])
    return 0
