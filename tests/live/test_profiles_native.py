"""The kernel's CPU clock, on a real child that computes in a library."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from made import TARGET

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Target
from dsagent.agent.host import procfs
from dsagent.agent.profiles.stacks import Recorded
from dsagent.agent.sources import cpu_clock
from dsagent.agent.sources.cpu_clock import INTERVAL_NS, CpuClockSource

PATIENCE_S = 90.0
CPU_NS = 6_000_000_000  # some 120 samples: half or twice of that is no bad luck
CHILD = """
import ctypes, threading
libc = ctypes.CDLL(None)
def sort():
    array = (ctypes.c_int * 200_000)()
    compare = libc.strcmp  # a function of the library too: no Python runs in between
    print("ready", flush=True)
    while True:
        libc.qsort(array, 200_000, 4, compare)
thread = threading.Thread(target=sort, name="sorter", daemon=True)
thread.start()
thread.join()
"""


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


def started(pid: int) -> CpuClockSource:
    target = Target(pid, 0, 0, "", (), "reference")
    source = CpuClockSource(target, lambda: (pid,), 1.0)
    try:
        source.start()
    except SourceUnavailable as reason:
        if "not permitted" in str(reason):
            pytest.skip(str(reason))
        raise
    return source


def used_ns(pid: int) -> int:
    stat = procfs.read_stat(pid)
    return stat.user_ns + stat.system_ns


def test_who_computed_where_and_how_much(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_clock, "RUN_NS", 1_000_000_000)
    source = started(child)
    before_ns = used_ns(child)
    runs: list[Recorded] = []
    deadline = time.monotonic() + PATIENCE_S
    while used_ns(child) - before_ns < CPU_NS:
        assert time.monotonic() < deadline, f"{PATIENCE_S:.0f} s for {CPU_NS / 1e9:.0f} s of CPU"
        time.sleep(0.1)
        runs += source.poll(time.monotonic_ns()).profiles
    took_ns = used_ns(child) - before_ns
    monkeypatch.setattr(cpu_clock, "RUN_NS", 0)
    runs += source.poll(time.monotonic_ns()).profiles
    status = source.status()
    source.stop()
    source.stop()
    assert (status.state, status.dropped) == ("ok", 0)
    seen = [each for run in runs for each in run.seen]
    assert all(run.pid == child and run.kind == "native" for run in runs)
    assert all(run.began_ns <= each.at_ns <= run.ended_ns for run in runs for each in run.seen)
    assert 0.5 < len(seen) * INTERVAL_NS / took_ns < 1.6
    libraries = Counter(each.frames[0].function for each in seen)
    assert libraries["libc.so.6"] > 0.5 * len(seen), libraries
    functions = Counter(each.frames[-1].function for each in seen)
    assert any("qsort" in name or "strcmp" in name or "exported" in name for name in functions)


def test_other_processes_are_not_looked_at(child: int) -> None:
    source = started(child)
    other = CpuClockSource(TARGET, lambda: (1 << 22,), 1.0)
    try:
        time.sleep(0.5)
        assert source.poll(time.monotonic_ns()).profiles == []
        assert other.poll(time.monotonic_ns()).profiles == []
    finally:
        source.stop()
        other.stop()


def test_it_pauses_where_max_overhead_leaves_too_little(
    child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_clock, "RUN_NS", 200_000_000)
    source = started(child)
    try:
        source.pace(2.0)  # the others take all there is, and more
        polled_until(source, lambda _runs: "--max-overhead" in source.status().reason)
        assert source.ratio > 0
        for ring in source._rings:
            ring.read()
        before_ns = used_ns(child)
        while used_ns(child) - before_ns < 500_000_000:  # ten samples, if any were taken
            assert source.poll(time.monotonic_ns()).profiles == []
            time.sleep(0.05)
        assert not any(ring.read() for ring in source._rings)
        source.pace(0.0)
        paused_ns = time.monotonic_ns()
        runs = polled_until(source, lambda runs: any(run.seen for run in runs))
        assert all(run.began_ns >= paused_ns for run in runs)
    finally:
        source.stop()


def polled_until(
    source: CpuClockSource, is_so: Callable[[Sequence[Recorded]], bool]
) -> list[Recorded]:
    """All that comes until it is so."""
    runs: list[Recorded] = []
    deadline = time.monotonic() + PATIENCE_S
    while not is_so(runs):
        assert time.monotonic() < deadline, f"{source.status()}, {len(runs)} runs"
        time.sleep(0.05)
        runs += source.poll(time.monotonic_ns()).profiles
    return runs
