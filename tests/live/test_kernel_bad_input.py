"""Kernels that lack something, and targets that are too many: said and counted, never fatal."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from kernel_lab import Child, Watch, require_kernel_source

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Kind, Target
from dsagent.agent.host.privileges import BPF_OBJECT
from dsagent.agent.sources.bpf.layout import MAX_PROCESSES, MAX_THREADS
from dsagent.agent.sources.kernel import KernelSource

pytestmark = pytest.mark.ebpf

NAP = "say(ready=True); hear(); nap(20_000); say(end=now()); hear()"


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()


def _with_other_names(folder: Path, name: str, old: bytes, new: bytes) -> Path:
    """The objects, one of which asks the kernel's types for something that they have not."""
    assert len(old) == len(new)
    for path in BPF_OBJECT.parent.glob("*.bpf.o"):
        shutil.copy(path, folder)
    changed = folder / f"{name}.bpf.o"
    data = changed.read_bytes()
    assert old in data
    changed.write_bytes(data.replace(old, new))
    return folder / BPF_OBJECT.name


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"tp_btf/sched_switch", b"tp_btf/sched_swxtch"), (b"\0bpf_storage\0", b"\0bpf_stxrage\0")],
    ids=["tracepoint", "field"],
)
def test_a_kernel_without_what_is_essential_is_refused_in_one_line(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    objects = _with_other_names(tmp_path, "sched", old, new)
    with Child(NAP) as child:
        child.hear()
        source = KernelSource(
            Target(child.pid, 0, 0, "child", (), "reference"), {}, object_path=objects
        )
        with pytest.raises(SourceUnavailable) as caught:
            source.start()
        assert str(caught.value).startswith("sched.bpf.o cannot be loaded: ")
        assert "\n" not in str(caught.value)
        assert source.status().state == "unavailable"
        source.stop()
        child.say()
        child.hear()  # it is none the worse for it


def test_a_kernel_without_another_object_s_types_does_without_that_object(tmp_path: Path) -> None:
    objects = _with_other_names(tmp_path, "memory", b"\0bpf_storage\0", b"\0bpf_stxrage\0")
    with Child(NAP) as child:
        child.hear()
        with Watch(child.pid, object_path=objects) as watch:
            child.say()
            watch.until(child.hear()["end"])
            status = watch.source.status()
    assert len(watch.of(Kind.OFF_OTHER, tid=child.pid, least_ns=1_000_000)) == 1
    assert status.state == "ok"
    assert "not measured: memory.major_fault (memory.bpf.o cannot be loaded: " in status.reason
    assert "cpu.irq" not in status.reason
    assert "memory.minor_fault" not in status.reason  # not of this tier


THREADS = """
threading.stack_size(64 << 10)
def work(naps):
    for _ in range(naps):
        nap(100)
def storm(count, at_once):
    for first in range(0, count, at_once):
        threads = [threading.Thread(target=work, args=(1,)) for _ in range(at_once)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
"""


def test_a_storm_of_threads_gives_its_places_back() -> None:
    body = f"""{THREADS}
say(ready=True); hear()
storm({MAX_THREADS + 500}, 50)
say(end=now()); hear()
"""
    with Child(body) as child:
        child.hear()
        with Watch(child.pid) as watch:
            child.say()
            watch.until(child.hear()["end"])
            status = watch.source.status()
            running = watch.source._running
            assert running is not None
            used = int(running._control["slots_used"][0])
    assert "not followed" not in status.reason
    assert used < 200
    ran = watch.of(Kind.ONCPU)
    assert len(set(ran["tid"].tolist())) > MAX_THREADS  # each was seen, though few at a time
    assert status.dropped == 0


def test_threads_beyond_the_table_are_counted_and_the_rest_goes_on() -> None:
    body = f"""{THREADS}
import _thread
out, into = os.pipe()
def wait_for(count):
    while _thread._count() != count:
        nap(10_000)
say(ready=True); hear()
for _ in range({MAX_THREADS + 100}):
    _thread.start_new_thread(os.read, (out, 1))
wait_for({MAX_THREADS + 100})
say(end=now()); hear()
os.write(into, bytes({MAX_THREADS + 100}))
wait_for(0)
say(end=now()); hear()
def last():
    nap(20_000)
    say(tid=threading.get_native_id(), end=now())
thread = threading.Thread(target=last)
thread.start(); thread.join()
hear()
"""
    with Child(body) as child:
        child.hear()
        with Watch(child.pid) as watch:
            child.say()
            watch.until(child.hear()["end"])
            status = watch.source.status()
            assert status.state == "ok"
            assert f"101 threads beyond {MAX_THREADS}" in status.reason
            child.say()
            watch.until(child.hear()["end"])
            child.say()
            told = child.hear()
            watch.until(told["end"])
    # Places that were given back are given out again.
    assert len(watch.of(Kind.OFF_OTHER, tid=told["tid"], least_ns=1_000_000)) == 1


def test_processes_beyond_the_table_are_counted() -> None:
    body = f"""
say(ready=True); hear()
for _ in range({MAX_PROCESSES + 13}):
    if os.fork() == 0:
        signal.pause()
say(end=now()); hear()
"""
    with Child(body) as child:
        child.hear()
        with Watch(child.pid) as watch:
            child.say()
            watch.until(child.hear()["end"])
            reason = watch.source.status().reason
    assert f"14 threads beyond {MAX_THREADS}, or processes beyond {MAX_PROCESSES}" in reason


def test_a_tier_is_changed_while_it_runs() -> None:
    body = """
say(ready=True)
while hear():
    memory = mmap.mmap(-1, 101 * mmap.PAGESIZE)
    memory.madvise(15)  # MADV_NOHUGEPAGE
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, 101 * mmap.PAGESIZE)
    say(end=now())
"""
    counted = []
    with Child(body) as child:
        child.hear()
        with Watch(child.pid, tier="full") as watch:
            for tier in ("full", "core", "default", "full"):
                watch.source.set_tier(tier, f"tier {tier}, for a test")
                before = int(watch.of(Kind.MINOR_FAULT, tid=child.pid)["count"].sum())
                child.say()
                watch.until(child.hear()["end"])
                watch.until(time.monotonic_ns())
                after = int(watch.of(Kind.MINOR_FAULT, tid=child.pid)["count"].sum())
                counted.append(after - before)
                assert watch.source.status().reason.startswith(f"tier {tier}, for a test")
    assert counted[0] >= 101 and counted[3] >= 101
    assert counted[1:3] == [0, 0]
