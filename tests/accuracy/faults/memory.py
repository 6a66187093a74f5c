"""Memory is taken away: the engine's code is paged out while it runs; or there is so little left
that each step has to free some before it gets any."""

from __future__ import annotations

import ctypes
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from bench import Bench, Injector
from truth import Fault, Injection, Timeline, in_engine, life

_PROCESS_MADVISE, _MADV_PAGEOUT = 440, 21
_CODE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp .*/libtorch_cpu\.so$", re.MULTILINE)
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def page_out(bench: Bench, dice: random.Random) -> Injection:
    """Again and again the kernel is told to drop the pages of torch's code from this process;
    each next step has to read from the disk what it needs of them."""
    maps = Path(f"/proc/{bench.target.pid}/maps").read_text()
    code = [(int(start, 16), int(end, 16)) for start, end in _CODE.findall(maps)]
    ranges = (_Range * len(code))(*[_Range(start, end - start) for start, end in code])
    pidfd = os.pidfd_open(bench.target.pid)
    start_ns = time.monotonic_ns()
    try:
        for _ in range(dice.randint(4, 16)):
            advised = _libc.syscall(
                _PROCESS_MADVISE, pidfd, ranges, ctypes.c_size_t(len(code)), _MADV_PAGEOUT, 0
            )
            if advised < 0:
                error = ctypes.get_errno()
                raise OSError(error, f"process_madvise: {os.strerror(error)}")
            time.sleep(dice.uniform(0.05, 0.2))
    finally:
        os.close(pidfd)
    return Injection("major_faults", start_ns, time.monotonic_ns())


MEMORY_CONTROLLER = Path("/sys/fs/cgroup/memory")
MEGABYTE = 1 << 20
# Fills the page cache of its cgroup with pages that must be written before they can be freed. It
# pauses (a busy one would take the CPU and the memory's bandwidth, which are other faults), and is
# the first to go where nothing can be freed.
_WRITER_CODE = """
import os, sys, time
os.setpriority(os.PRIO_PROCESS, 0, 10)
open("/proc/self/oom_score_adj", "w").write("1000")
file, size = os.open(sys.argv[1], os.O_RDWR), int(sys.argv[2])
noise, at = os.urandom(1 << 20), 0
sys.stdin.readline()
while True:
    os.pwrite(file, noise, at)
    at = (at + len(noise)) % size
    time.sleep(0.002)
"""


def reclaim(bench: Bench, dice: random.Random) -> Injection:
    """The engine's cgroup has memory for one pass and little more, and the rest of it is full of
    what another process there writes. What each pass's memory takes beyond what it took before
    there was a limit is the deed."""
    megabytes, calls = dice.randint(12, 40), dice.randint(12, 28)
    limit_bytes = (megabytes + dice.randint(32, 64)) * MEGABYTE
    with _memory_cgroup(bench.target.pid) as group, tempfile.NamedTemporaryFile() as file:
        start_ns = time.monotonic_ns()
        calm = bench.target.fault("memory", amount=megabytes, calls=5, limit_s=20)
        usual_ns = round(median(end - start for start, end in calm))
        with _writer(file.name, 4 * limit_bytes) as writer:
            group.joinpath("cgroup.procs").write_text(str(writer.pid))
            group.joinpath("memory.limit_in_bytes").write_text(str(limit_bytes))
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
            _fill(group, limit_bytes)
            slow = bench.target.fault("memory", amount=megabytes, calls=calls, limit_s=20)
    beyond = [(start + usual_ns, end) for start, end in slow if end - start > usual_ns]
    return Injection("reclaim", start_ns, time.monotonic_ns(), Timeline.of(beyond))


def _fill(group: Path, limit_bytes: int) -> None:
    deadline = time.monotonic() + 5
    while int(group.joinpath("memory.usage_in_bytes").read_text()) < 0.9 * limit_bytes:
        if time.monotonic() > deadline:
            raise RuntimeError("the cgroup did not fill")
        time.sleep(0.01)


@contextmanager
def _writer(path: str, size: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _WRITER_CODE, path, str(size)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


@contextmanager
def _memory_cgroup(pid: int) -> Iterator[Path]:
    """The process in a cgroup (v1, memory) of its own, for this long. What it has stays where it
    is: only what is new counts there."""
    home = _memory_home(pid)
    assert home is not None
    group = home / f"dsagent-lab-{pid}"
    group.mkdir()
    try:
        group.joinpath("cgroup.procs").write_text(str(pid))
        yield group
    finally:
        group.joinpath("memory.limit_in_bytes").write_text("-1")
        with suppress(ProcessLookupError):
            home.joinpath("cgroup.procs").write_text(str(pid))
        with suppress(OSError):
            group.joinpath("memory.force_empty").write_text("0")
        group.rmdir()


def _memory_home(pid: int) -> Path | None:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return MEMORY_CONTROLLER / path.lstrip("/")
    return None


def _no_memory_cgroup(bench: Bench) -> str:
    home = _memory_home(bench.target.pid)
    writable = home is not None and os.access(home, os.W_OK)
    return "" if writable else "no writable cgroup v1 memory controller"


MAJOR_FAULTS = Injector(
    Fault("major_faults", frozenset({"memory.major_fault"}), "counterfactual", life),
    "smollm2",
    page_out,
)
RECLAIM = Injector(
    Fault("reclaim", frozenset({"memory.reclaim"}), "logged", in_engine),
    "smollm2, one thread",
    reclaim,
    refused=_no_memory_cgroup,
)
