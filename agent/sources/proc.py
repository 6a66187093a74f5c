"""What /proc says of the target's processes, its cgroup, the machine, and of the agent itself.

Every second, by catalogue names. Counters count from attaching on and never
fall when a process ends. Processes of one name are added up: a pid is never an
attribute, and at most 16 names are told apart.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.facts import Readings, Sample, SourceStatus, Target
from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import PROC, ProcessGone

INTERVAL_NS = 1_000_000_000
PSS_INTERVAL_NS = 10_000_000_000  # reading it walks all of our page tables
MAX_NAMES = 16
MAX_THREADS = 4096

Labels = tuple[tuple[str, str], ...]
_COMM = "process.executable.name"
_CPU_LINE = re.compile(rb"cpu(?: +[0-9]{1,20})+")


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one process: counters by (name, labels), gauges by name."""

    comm: str
    counters: dict[tuple[str, Labels], float]
    gauges: dict[str, float]


def read_process(pid: int, proc: Path = PROC) -> Reading:
    """Raises ProcessGone, PermissionError."""
    stat = procfs.read_stat(pid, proc)
    fault = "system.paging.fault.type"
    counters: dict[tuple[str, Labels], float] = {
        ("process.cpu.time", (("cpu.mode", "user"),)): stat.user_ns / 1e9,
        ("process.cpu.time", (("cpu.mode", "system"),)): stat.system_ns / 1e9,
        ("process.paging.faults", ((fault, "minor"),)): stat.minor_faults,
        ("process.paging.faults", ((fault, "major"),)): stat.major_faults,
    }
    try:
        io = procfs.read_bytes(proc / str(pid) / "io")
    except PermissionError:  # of another user: not even for who may trace it
        io = b""
    for key, direction in ((b"read_bytes", "read"), (b"write_bytes", "write")):
        if found := re.search(rb"^" + key + rb": (\d+)$", io, re.MULTILINE):
            counters["process.disk.io", (("disk.io.direction", direction),)] = int(found.group(1))
    gauges = {
        "process.memory.usage": float(stat.rss_bytes),
        "process.thread.count": float(stat.threads),
        "process.unix.file_descriptor.count": float(
            len(procfs.list_names(proc / str(pid) / "fdinfo"))
        ),
    }
    return Reading(stat.comm, counters, gauges)


def read_machine_cpu(proc: Path = PROC) -> dict[str, float]:
    """Seconds of CPU by mode since boot, all CPUs together; none where the line is no such."""
    modes = ("user", "nice", "system", "idle", "iowait", "interrupt", "softirq", "steal")
    line = procfs.read_bytes(proc / "stat").split(b"\n", 1)[0]
    fields = line.split()[1:] if _CPU_LINE.fullmatch(line) else []
    return {
        mode: int(ticks) * procfs.CLOCK_TICK_NS / 1e9
        for mode, ticks in zip(modes, fields, strict=False)
    }


def read_throttled_s(pid: int, proc: Path = PROC, sys: Path = Path("/sys")) -> float | None:
    """How long the cgroup's quota kept its tasks from running, since it was made; None where
    its CPU controller says nothing."""
    for line in os.fsdecode(procfs.read_bytes(proc / str(pid) / "cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        if "\0" in rest or ".." in path.split("/"):  # outside of what we see of the cgroups
            continue
        folder = sys / "fs/cgroup" / controllers / path.lstrip("/")
        try:
            text = procfs.read_bytes(folder / "cpu.stat").decode("utf-8", "replace")
        except (ProcessGone, OSError):  # OSError: not ours to read, or removed while it was read
            continue
        if found := re.search(r"^throttled_usec (\d+)$", text, re.MULTILINE):
            return int(found.group(1)) / 1e6
        if found := re.search(r"^throttled_time (\d+)$", text, re.MULTILINE):
            return int(found.group(1)) / 1e9
    return None


class _Counters:
    """Sums of increases, by series; what was there at the first sight of a key does not count."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, str, Labels], float] = {}
        self.totals: dict[tuple[str, Labels], float] = {}

    def update(self, key: object, name: str, labels: Labels, series: Labels, value: float) -> None:
        before = self._seen.get((key, name, labels), value)
        self._seen[key, name, labels] = value
        total = self.totals.get((name, series), 0.0)
        self.totals[name, series] = total + max(0.0, value - before)

    def forget(self, keep: set[object]) -> None:
        self._seen = {key: value for key, value in self._seen.items() if key[0] in keep}


class ProcSource:
    """`pids`: the target's processes now; asked once a second."""

    name = "proc"

    def __init__(self, target: Target, pids: Callable[[], tuple[int, ...]]) -> None:
        self._target = target
        self._pids = pids
        self._counters = _Counters()
        self._names: set[str] = set()
        self._next_ns = 0
        self._next_pss_ns = 0
        self._agent_pss_bytes: int | None = None
        self._unreadable = 0
        self._cost_ns = 0

    def start(self) -> None:
        """Needs nothing; the first poll sets what the counters count from."""

    def poll(self, now_ns: int) -> Readings:
        readings = Readings()
        if now_ns < self._next_ns:
            return readings
        started_ns = time.thread_time_ns()
        self._next_ns = now_ns + INTERVAL_NS
        gauges: dict[tuple[str, Labels], float] = {}
        keys: set[object] = {"machine", "cgroup"}
        for pid in self._pids():
            try:
                reading = read_process(pid)
                switches = self._switches(pid, keys)
            except ProcessGone:
                continue
            except PermissionError:
                self._unreadable += 1
                continue
            comm = ((_COMM, self._label(reading.comm)),)
            keys.add(pid)
            for (name, labels), value in reading.counters.items():
                self._counters.update(pid, name, labels, comm + labels, value)
            for name, value in reading.gauges.items():
                gauges[name, comm] = gauges.get((name, comm), 0.0) + value
            self._count_switches(comm, switches)
        self._read_machine()
        self._counters.forget(keys)
        series = {**self._counters.totals, **gauges}
        readings.samples.extend(
            Sample(name, value, now_ns, dict(labels)) for (name, labels), value in series.items()
        )
        readings.samples.extend(self._own(now_ns))
        self._cost_ns += time.thread_time_ns() - started_ns
        return readings

    def _label(self, comm: str) -> str:
        if comm in self._names or len(self._names) < MAX_NAMES:
            self._names.add(comm)
            return comm
        return "~other"

    def _switches(self, pid: int, keys: set[object]) -> list[tuple[int, int, int]]:
        """(tid, voluntary, involuntary) of each thread: the process's own file has only its
        first thread's."""
        found = []
        for tid in procfs.threads(pid)[:MAX_THREADS]:
            try:
                found.append((tid, *procfs.context_switches(pid, tid)))
            except ProcessGone:
                continue
            keys.add(("thread", tid))
        return found

    def _count_switches(self, comm: Labels, switches: list[tuple[int, int, int]]) -> None:
        name, kind = "process.context_switches", "process.context_switch.type"
        for tid, voluntary, involuntary in switches:
            for label, value in (("voluntary", voluntary), ("involuntary", involuntary)):
                labels = ((kind, label),)
                self._counters.update(("thread", tid), name, labels, comm + labels, value)

    def _read_machine(self) -> None:
        for mode, seconds in read_machine_cpu().items():
            labels = (("cpu.mode", mode),)
            self._counters.update("machine", "system.cpu.time", labels, labels, seconds)
        try:
            throttled_s = read_throttled_s(self._target.pid)
        except (ProcessGone, PermissionError):
            return
        if throttled_s is not None:
            self._counters.update("cgroup", "dsagent.cgroup.cpu.throttled", (), (), throttled_s)

    def _own(self, now_ns: int) -> list[Sample]:
        if now_ns >= self._next_pss_ns:
            self._next_pss_ns = now_ns + PSS_INTERVAL_NS
            self._agent_pss_bytes = procfs.own_pss_bytes()
        samples = [Sample("dsagent.agent.cpu.time", time.process_time_ns() / 1e9, now_ns)]
        if self._agent_pss_bytes is not None:
            samples.append(Sample("dsagent.agent.memory.pss", float(self._agent_pss_bytes), now_ns))
        return samples

    def status(self) -> SourceStatus:
        reason = "some processes of the target cannot be read" if self._unreadable else ""
        return SourceStatus(self.name, "ok", reason, self._unreadable, cost_ns=self._cost_ns)

    def stop(self) -> None:
        """Nothing is held."""
