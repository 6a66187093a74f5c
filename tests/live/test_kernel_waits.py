"""Waits of a known number and kind, made by one child and counted in the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_lab import Child, Watch, measured, overlap_ns, require_kernel_source, within

from dsagent.agent.facts import Kind

pytestmark = pytest.mark.ebpf

FUTEX_BODY = """
memory = mmap.mmap(-1, 4096)
word = ctypes.addressof(ctypes.c_uint32.from_buffer(memory))
def wait(nanoseconds=None):  # FUTEX_WAIT while the word is 0
    timeout = None if nanoseconds is None else struct.pack("qq", 0, nanoseconds)
    libc.syscall(202, ctypes.c_void_p(word), 0, 0, timeout, None, 0)
def wake():
    libc.syscall(202, ctypes.c_void_p(word), 1, 1, None, None, 0)
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()


def test_23_sleeps_are_23_intervals() -> None:
    body = """
say(ready=True); hear()
start = now()
for _ in range(23):
    nap(20_000)
say(start=start, end=now()); hear()
"""
    watch, told = measured(body)
    asleep = watch.of(Kind.OFF_OTHER, tid=told["pid"], least_ns=1_000_000)
    asleep = within(asleep, told["start"], told["end"])
    assert len(asleep) == 23
    assert np.all(asleep["exact"] == 1)
    assert np.all(asleep["ns"] == asleep["end_ns"] - asleep["start_ns"])
    assert watch.status.state == "ok"
    assert watch.status.dropped == 0
    assert watch.status.cost_ns > 0


def test_23_futex_waits_name_who_ended_them() -> None:
    body = (
        FUTEX_BODY
        + """
say(ready=True); hear()
waiter = os.getpid()
child = os.fork()  # followed: it is made while we are being watched
if child == 0:
    while hear() == "wake":
        wake()
    os._exit(0)
start = now()
for _ in range(23):
    say(waiting=True, waker=child)
    wait()
say(start=start, end=now()); os.waitpid(child, 0)
"""
    )

    def wake(child: Child, watch: Watch) -> dict[str, Any]:
        for _ in range(23):
            waker = child.hear()["waker"]
            _wait_until_asleep(child.pid)
            child.say("wake")
        return {"waker": waker}

    watch, told = measured(body, during=wake, exact_ns=1)
    waits = within(watch.of(Kind.OFF_FUTEX, tid=told["pid"]), told["start"], told["end"])
    assert len(waits) == 23
    assert set(waits["culprit_pid"].tolist()) == {told["waker"]}
    assert set(waits["culprit_tid"].tolist()) == {told["waker"]}


def test_a_futex_wait_that_times_out_blames_nobody() -> None:
    body = (
        FUTEX_BODY
        + """
say(ready=True); hear()
start = now()
for _ in range(7):
    wait(20_000_000)
say(start=start, end=now()); hear()
"""
    )
    watch, told = measured(body)
    waits = watch.of(Kind.OFF_FUTEX, tid=told["pid"], least_ns=1_000_000)
    assert len(waits) == 7
    assert not waits["culprit_pid"].any()


def test_short_waits_are_summed_and_none_is_lost() -> None:
    """Below the threshold only sums arrive; their counts add up all the same."""
    body = """
say(ready=True); hear()
for _ in range(211):
    nap(10)
say(end=now()); hear()
"""
    watch, told = measured(body, exact_ns=1 << 60)
    slept = watch.of(Kind.OFF_OTHER, tid=told["pid"])
    # The wait for our word had begun before we attached: when is not known, so it is not told.
    assert int(slept["count"].sum()) == 211


def test_a_fork_and_its_threads_are_followed() -> None:
    body = """
say(ready=True); hear()
child = os.fork()
if child == 0:
    def work():
        nap(20_000)
        say(tid=threading.get_native_id(), pid=os.getpid())
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads: thread.start(); thread.join()
    os._exit(0)
os.waitpid(child, 0)
say(end=now()); hear()
"""

    def listen(child: Child, watch: Watch) -> dict[str, Any]:
        return {"naps": [child.hear() for _ in range(3)]}

    watch, told = measured(body, during=listen)
    for nap in told["naps"]:
        slept = watch.of(Kind.OFF_OTHER, tid=nap["tid"], least_ns=1_000_000)
        assert len(slept) == 1
        assert slept["pid"][0] == nap["pid"]


def test_disk_waits_are_told_from_others(tmp_path: object) -> None:
    """fsync of fresh data waits for the block device, if the file system has one."""
    body = f"""
path = {str(tmp_path)!r} + "/data"
say(ready=True); hear()
start = now()
with open(path, "wb", buffering=0) as file:
    for _ in range(7):
        file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
say(start=start, end=now(), device=os.stat(path).st_dev); hear()
"""
    watch, told = measured(body)
    disk = within(watch.of(Kind.OFF_FSYNC, tid=told["pid"]), told["start"], told["end"])
    assert int(disk["count"].sum()) >= 7
    assert overlap_ns(disk, told["start"], told["end"]) > 0


def _wait_until_asleep(pid: int) -> None:
    """Until the thread sleeps in the kernel, so that the wake-up ends a wait."""
    while True:
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "S":
                return


def test_a_thread_that_names_itself_is_called_by_that_name() -> None:
    body = (
        FUTEX_BODY
        + """
import threading
def helper():
    libc.prctl(15, b"named-late", 0, 0, 0)
    for _ in range(5):
        nap(20_000)
        wake()
    told.wait()
told = threading.Event()
thread = threading.Thread(target=helper)
say(ready=True); hear()
thread.start()
for _ in range(5):
    wait()
say(waker=thread.native_id, end=now()); hear()
told.set()
thread.join()
"""
    )
    watch, told = measured(body)
    assert watch.names[told["waker"]] == "named-late"
