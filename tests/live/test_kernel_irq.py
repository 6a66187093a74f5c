"""What is taken from a running thread without a switch, beside what the kernel's books say."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_lab import Child, Watch, last_cpu, require_kernel_source

from dsagent.agent.facts import Kind

pytestmark = pytest.mark.ebpf


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()


def _received_softirqs() -> int:
    """Of the kind NET_RX, on all CPUs."""
    for line in Path("/proc/softirqs").read_text().splitlines():
        if line.strip().startswith("NET_RX"):
            return sum(map(int, line.split()[1:]))
    raise AssertionError("no NET_RX")


def test_997_datagrams_on_loopback_are_as_many_soft_interrupts() -> None:
    """Each is received on top of the thread that sends it, before its system call returns."""
    body = """
import socket
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("127.0.0.1", 0))
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
to = receiver.getsockname()
say(ready=True); hear()
start = now()
for _ in range(997):
    sender.sendto(b"x", to)
say(start=start, end=now()); hear()
"""
    with Child(body) as child:
        child.hear()
        with Watch(child.pid) as watch:
            before = _received_softirqs()
            child.say()
            told = child.hear()
            booked = _received_softirqs() - before
            watch.until(told["end"] + 50_000_000)
    interrupts = watch.of(Kind.IRQ, tid=child.pid)
    # Where ksoftirqd is about to run anyway, it receives them: so not each for certain.
    assert booked >= 900
    assert int(interrupts["count"].sum()) >= 900
    assert 0 < int(interrupts["ns"].sum()) < told["end"] - told["start"]


def test_stolen_time_is_no_more_than_the_kernel_books() -> None:
    body = """
say(ready=True); hear()
start = now()
spin(0.5)
say(start=start, end=now()); hear()
"""
    cpu = last_cpu()
    with Child(body, cpu=cpu) as child:
        child.hear()
        with Watch(child.pid) as watch:
            before_ns = _stolen_ns(cpu)
            child.say()
            told = child.hear()
            watch.until(told["end"] + 50_000_000)
            stolen_ns = _stolen_ns(cpu) - before_ns
    told_ns = int(watch.of(Kind.STEAL, tid=child.pid)["ns"].sum())
    assert told_ns <= stolen_ns + 20_000_000  # the book counts hundredths of a second
    assert told_ns or stolen_ns < 100_000_000


def _stolen_ns(cpu: int) -> int:
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith(f"cpu{cpu} "):
            return int(line.split()[8]) * 10_000_000
    raise AssertionError("no such CPU")
