"""Where the target's threads compute, native code and all: the kernel's own CPU clock, sampled.

One software event of perf on each CPU that the target may use tells, every 50 ms of the CPU's
time, which thread is on it and at which address. It pauses nobody and needs no frame pointers: of
the stack only the innermost function is known. Threads that run no Python are seen too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Readings, SourceStatus, Target
from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import ProcessGone
from dsagent.agent.profiles.native_names import KERNEL, UNKNOWN, NativeNames
from dsagent.agent.profiles.pace import allowance, is_paid
from dsagent.agent.profiles.stacks import Frame, Recorded, Seen

INTERVAL_NS = 50_000_000
RUN_NS = 10_000_000_000
MAX_CPUS = 1024
MAX_SAMPLES = 50_000  # of one run
MAX_PROCESSES = 16  # whose symbols are kept
PAGES = 4  # of each CPU's ring, beside its head: 400 samples

_NUMBERS = {"x86_64": 298, "aarch64": 241}  # perf_event_open
_ATTRIBUTE = struct.Struct("=IIQQQQQIIQQQQIiQIHH")
_SOFTWARE, _CPU_CLOCK = 1, 0
_IP_TID_TIME = 1 | 2 | 4
_EXCLUDE_IDLE, _USE_CLOCKID = 1 << 7, 1 << 25
_CLOEXEC = 8
_HEAD_AT, _TAIL_AT = 1024 // 8, 1032 // 8  # words of the first page
_HEADER, _SAMPLE, _LOST = struct.Struct("=IHH"), struct.Struct("=QIIQ"), struct.Struct("=QQ")
_IS_SAMPLE, _IS_LOST = 9, 2
_MODE, _KERNEL_MODE = 7, 1
_ENABLE, _DISABLE = 0x2400, 0x2401


class CpuClockSource:
    """A facts.Source named "native": what it brings are profiles."""

    name = "native"

    def __init__(
        self, target: Target, pids: Callable[[], Sequence[int]], max_overhead_ratio: float
    ) -> None:
        """`pids`: the target's processes as they are now."""
        self._target = target
        self._pids = pids
        self._max_ratio = max_overhead_ratio
        self._allowed_ratio = allowance(max_overhead_ratio, 0.0, 0.0)
        self._cpus = 1
        self._run_cost_ns = 0
        self._is_paused = False
        self.ratio = 0.0  # of the target's CPUs: what the last run took, over the time it paid for
        self._rings: list[_Ring] = []
        self._samples: list[_Taken] = []
        self._names: dict[int, NativeNames] = {}
        self._began_ns = 0
        self._dropped = 0
        self._unnamed = ""
        self._cost_ns = 0

    def start(self) -> None:
        if platform.machine() not in _NUMBERS:
            raise SourceUnavailable(f"not known on {platform.machine()}")
        try:
            cpus = sorted(os.sched_getaffinity(self._target.pid))[:MAX_CPUS]
            self._cpus = len(cpus)
            for ring in _open(cpus):
                self._rings.append(ring)  # one by one: those opened before a failure are closed
        except OSError as error:
            self.stop()
            if error.errno in (errno.EACCES, errno.EPERM):
                raise SourceUnavailable(
                    "not permitted: sampling CPUs needs CAP_PERFMON, or perf_event_paranoid at -1"
                ) from error
            raise SourceUnavailable(f"perf_event_open: {error.strerror}") from error
        self._began_ns = time.monotonic_ns()

    def pace(self, seen_ratio: float) -> None:
        """Once a window: what watching costs now, with this and without other samplers. The runs to
        come take what that leaves."""
        self._allowed_ratio = allowance(self._max_ratio, seen_ratio, self.ratio)

    def poll(self, now_ns: int) -> Readings:
        began_ns = time.thread_time_ns()
        readings = Readings()
        if self._is_paused and not self._go_on(now_ns):
            return readings
        own = set(self._pids())
        for ring in self._rings:
            for taken in ring.read():
                if taken.pid in own and len(self._samples) < MAX_SAMPLES:
                    self._samples.append(taken)
                elif taken.pid in own:
                    self._dropped += 1
            self._dropped += ring.take_lost()
        is_over = now_ns >= self._began_ns + RUN_NS
        if is_over:
            readings.profiles += self._recorded(now_ns)
            self._samples = []
        cost_ns = time.thread_time_ns() - began_ns
        self._cost_ns += cost_ns
        self._run_cost_ns += cost_ns
        if is_over and not self._go_on(now_ns):
            self._is_paused = True
            for ring in self._rings:
                ring.enable(False)
        return readings

    def _go_on(self, now_ns: int) -> bool:
        """Begins the next run, once the last one is paid; whether it is."""
        elapsed_ns = max(1, now_ns - self._began_ns)
        self.ratio = self._run_cost_ns / elapsed_ns / self._cpus
        if not is_paid(self._run_cost_ns, self._allowed_ratio, self._cpus, elapsed_ns):
            return False
        if self._is_paused:
            for ring in self._rings:
                ring.read()  # of the last run, from after its end
                ring.enable(True)
        self._began_ns, self._run_cost_ns, self._is_paused = now_ns, 0, False
        return True

    def _recorded(self, now_ns: int) -> Iterator[Recorded]:
        by_pid: dict[int, list[_Taken]] = {}
        for taken in self._samples:
            by_pid.setdefault(taken.pid, []).append(taken)
        for pid in set(self._names) - by_pid.keys():
            self._names.pop(pid).close()
        for pid, row in by_pid.items():
            names = self._names_of(pid)
            threads = {tid: _thread_name(tid) for tid in {taken.tid for taken in row}}
            seen = [
                Seen(taken.at_ns, taken.tid, threads[taken.tid], _frames(taken, names))
                for taken in row
                if self._began_ns <= taken.at_ns <= now_ns
            ]
            seen.sort(key=lambda each: each.at_ns)
            yield Recorded(pid, self._began_ns, now_ns, INTERVAL_NS, tuple(seen), kind="native")

    def _names_of(self, pid: int) -> NativeNames | None:
        """None where its memory may not be read: then addresses have no names."""
        try:
            names = self._names.get(pid)
            if names is None and len(self._names) < MAX_PROCESSES:
                names = self._names[pid] = NativeNames(pid)
            if names is not None:
                names.look_again()
        except ProcessGone:
            return None
        except PermissionError:
            self._unnamed = "functions have no names: reading memory needs CAP_SYS_PTRACE"
            return None
        return names

    def status(self) -> SourceStatus:
        paused = "paused: --max-overhead leaves too little for it" if self._is_paused else ""
        reason = "; ".join(filter(None, (paused, self._unnamed)))
        return SourceStatus(self.name, "ok", reason, self._dropped, cost_ns=self._cost_ns)

    def stop(self) -> None:
        for ring in self._rings:
            ring.close()
        self._rings = []
        for names in self._names.values():
            names.close()
        self._names = {}


class _Taken:
    """A sample as the kernel took it."""

    __slots__ = ("address", "at_ns", "in_kernel", "pid", "tid")

    def __init__(self, at_ns: int, pid: int, tid: int, address: int, in_kernel: bool) -> None:
        self.at_ns, self.pid, self.tid = at_ns, pid, tid
        self.address, self.in_kernel = address, in_kernel


class _Ring:
    """What the kernel writes for one CPU."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = PAGES * mmap.PAGESIZE
        self._map = mmap.mmap(fd, mmap.PAGESIZE + self._size)
        self._view = memoryview(self._map)
        self._words = self._view[: mmap.PAGESIZE].cast("Q")
        self._data = self._view[mmap.PAGESIZE :]
        self._lost = 0

    def read(self) -> list[_Taken]:
        head, tail = self._words[_HEAD_AT], self._words[_TAIL_AT]
        found = []
        while head - tail >= _HEADER.size:
            kind, misc, size = _HEADER.unpack(self._at(tail, _HEADER.size))
            if size < _HEADER.size or size > head - tail:
                break  # never, by the kernel's word
            body = self._at(tail + _HEADER.size, size - _HEADER.size)
            if kind == _IS_SAMPLE and len(body) >= _SAMPLE.size:
                address, pid, tid, at_ns = _SAMPLE.unpack_from(body)
                found.append(_Taken(at_ns, pid, tid, address, misc & _MODE == _KERNEL_MODE))
            elif kind == _IS_LOST and len(body) >= _LOST.size:
                self._lost += _LOST.unpack_from(body)[1]
            tail += size
        self._words[_TAIL_AT] = tail
        return found

    def _at(self, position: int, size: int) -> bytes:
        start = position % self._size
        piece = bytes(self._data[start : start + size])
        return piece + bytes(self._data[: size - len(piece)])

    def enable(self, on: bool) -> None:
        """Whether the kernel takes samples."""
        fcntl.ioctl(self._fd, _ENABLE if on else _DISABLE, 0)

    def take_lost(self) -> int:
        """Of the whole CPU, since the last call: whose they were, nobody knows."""
        lost, self._lost = self._lost, 0
        return lost

    def close(self) -> None:
        self._words.release()
        self._data.release()
        self._view.release()
        self._map.close()
        os.close(self._fd)


def _open(cpus: Sequence[int]) -> Iterator[_Ring]:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _EXCLUDE_IDLE | _USE_CLOCKID
    attribute = _ATTRIBUTE.pack(
        *(_SOFTWARE, _ATTRIBUTE.size, _CPU_CLOCK, INTERVAL_NS, _IP_TID_TIME, 0, flags),
        *(0, 0, 0, 0, 0, 0, 0, time.CLOCK_MONOTONIC, 0, 0, 0, 0),
    )
    memory = ctypes.create_string_buffer(attribute, _ATTRIBUTE.size)
    number = _NUMBERS[platform.machine()]
    for cpu in cpus:
        fd = libc.syscall(number, memory, -1, cpu, -1, _CLOEXEC)
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        try:
            ring = _Ring(fd)
        except OSError:  # more than may be locked in memory
            os.close(fd)
            raise
        yield ring


def _frames(taken: _Taken, names: NativeNames | None) -> tuple[Frame, ...]:
    if taken.in_kernel:
        return (KERNEL,)
    return (UNKNOWN,) if names is None else names.frames(taken.address)


def _thread_name(tid: int) -> str:
    try:
        return procfs.read_stat(tid).comm
    except (ProcessGone, PermissionError):
        return ""
