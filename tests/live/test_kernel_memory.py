"""Waits for memory of a known number: page faults, reclaim, and who is killed for want of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kernel_lab import Child, Watch, require_kernel_source, within

from dsagent.agent.facts import Facts, Kind

pytestmark = pytest.mark.ebpf


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()


def _faults(pid: int) -> tuple[int, int]:
    """Minor and major ones so far, as the kernel's other book has them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7]), int(fields[9])


def _count(facts: Facts) -> int:
    return int(facts["count"].sum())


def test_minor_faults_are_those_of_the_kernels_own_book() -> None:
    body = """
memory = mmap.mmap(-1, 101 * mmap.PAGESIZE)
memory.madvise(15)  # MADV_NOHUGEPAGE
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
say(ready=True); hear()
start = now()
ctypes.memset(address, 1, 101 * mmap.PAGESIZE)
say(start=start, end=now()); hear()
"""
    with Child(body) as child:
        child.hear()
        with Watch(child.pid, tier="full") as watch:
            before, _ = _faults(child.pid)
            child.say()
            told = child.hear()
            watch.until(told["end"] + 50_000_000)
            after, _ = _faults(child.pid)
            watch.until(time.monotonic_ns())
    minor = watch.of(Kind.MINOR_FAULT, tid=child.pid)
    assert after - before >= 101
    assert _count(minor) == after - before
    assert int(minor["ns"].sum()) > 0
    assert not _count(watch.of(Kind.MAJOR_FAULT))


@pytest.mark.parametrize("tier", ["default", "full"])
def test_pages_that_were_paged_out_are_major_faults(tmp_path: Path, tier: str) -> None:
    body = f"""
file = open({str(tmp_path / "weights")!r}, "wb+")
file.write(os.urandom(31 * mmap.PAGESIZE)); file.flush(); os.fsync(file.fileno())
memory = mmap.mmap(file.fileno(), 0)
memory.madvise(1)  # MADV_RANDOM: no read ahead
sum(memory[::mmap.PAGESIZE])
memory.madvise(21)  # MADV_PAGEOUT
say(ready=True); hear()
start = now()
for page in range(31):
    memory[page * mmap.PAGESIZE]
say(start=start, end=now()); hear()
"""
    with Child(body) as child:
        child.hear()
        with Watch(child.pid, tier=tier) as watch:
            _, before = _faults(child.pid)
            child.say()
            told = child.hear()
            _, after = _faults(child.pid)
            watch.until(told["end"])
    if after == before:
        pytest.skip("the file system has nothing to read from")
    major = watch.of(Kind.MAJOR_FAULT, tid=child.pid)
    # Paging out is a wish, and a page that somebody holds just then stays: the kernel's own count.
    assert _count(major) == after - before
    assert 16 <= after - before <= 31
    assert int(major["ns"].sum()) <= told["end"] - told["start"]
    exact = major[major["exact"] == 1]
    assert len(within(exact, told["start"], told["end"])) == len(exact)
    # Waiting for the device is a part of the fault.
    asleep = watch.of(Kind.OFF_DISK, tid=child.pid)
    assert 0 < int(asleep["ns"].sum()) <= int(major["ns"].sum())


@pytest.fixture
def limited() -> Iterator[Path]:
    """A cgroup that may have 32 MiB."""
    controller = Path("/sys/fs/cgroup/memory")
    if not (controller / "memory.limit_in_bytes").exists():
        pytest.skip("no cgroup v1 memory controller")
    group = controller / f"dsagent-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(32 << 20))
    yield group
    (group / "memory.force_empty").write_text("1")
    group.rmdir()


def test_reclaim_within_a_cgroup_is_told(limited: Path, tmp_path: Path) -> None:
    body = f"""
file = open({str(tmp_path / "holes")!r}, "wb+", buffering=0)
file.truncate(128 << 20)
say(ready=True); hear()
start = now()
for _ in range(128):
    file.read(1 << 20)
say(start=start, end=now()); hear()
"""
    with Child(body) as child:
        child.hear()
        (limited / "cgroup.procs").write_text(str(child.pid))
        with Watch(child.pid, exact_ns=1) as watch:
            before = int((limited / "memory.failcnt").read_text())
            child.say()
            told = child.hear()
            failed = int((limited / "memory.failcnt").read_text()) - before
            watch.until(told["end"])
    reclaims = within(watch.of(Kind.RECLAIM, tid=child.pid), told["start"], told["end"])
    # Each time that the limit was hit, the thread freed memory once.
    assert failed > 0
    assert failed * 0.5 <= _count(reclaims) <= failed
    assert np.all(reclaims["ns"] > 0)


def test_a_process_killed_for_its_memory_is_an_event(limited: Path) -> None:
    body = """
say(ready=True); hear()
child = os.fork()
if child == 0:
    bytearray(os.urandom(1 << 20) * 64)
    os._exit(0)
_, status = os.waitpid(child, 0)
say(end=now(), child=child, signal=os.WTERMSIG(status)); hear()
"""
    with Child(body) as child:
        child.hear()
        (limited / "cgroup.procs").write_text(str(child.pid))
        with Watch(child.pid) as watch:
            child.say()
            told = child.hear()
            watch.until(told["end"])
    assert told["signal"] == signal.SIGKILL
    killed = [event for event in watch.events if event.name == "memory.oom"]
    assert [event.attributes["process.pid"] for event in killed] == [told["child"]]


def test_the_exec_of_another_binary_is_an_event() -> None:
    body = """
say(ready=True); hear()
child = os.fork()
if child == 0:
    os.execv("/bin/true", ["true"])
os.waitpid(child, 0)
say(end=now(), child=child); hear()
"""
    with Child(body) as child:
        child.hear()
        with Watch(child.pid) as watch:
            child.say()
            told = child.hear()
            watch.until(told["end"])
    (event,) = watch.events
    assert event.name == "process.exec"
    assert event.message == f"{told['child']} now runs another binary: true"
