"""Interrupts on top of the engine: packets that its CPU has to work off."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import Bench, Injector
from ending import end
from truth import Fault, Injection, life

# Which CPUs receive what loopback delivers; none: the sender's, in its own time.
_STEERING = Path("/sys/class/net/lo/queues/rx-0/rps_cpus")
# Each call sends so many packets at once, cut only where they are received: the sender's own CPU
# has little to do, and each interrupt much.
_FLOOD_CODE = """
import os, socket, sys, time
cpu, seconds, at_once, pause_s = int(sys.argv[1]), *map(float, sys.argv[2:5])
os.sched_setaffinity(0, {cpu})
deaf = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
deaf.bind(("127.0.0.1", 0))  # nobody reads: what does not fit is dropped there, in the interrupt
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.connect(deaf.getsockname())
sender.setsockopt(socket.IPPROTO_UDP, 103, 100)  # UDP_SEGMENT: packets of 100 bytes
packets = bytes(6400)
print("ready", flush=True)
end = time.monotonic() + seconds
while time.monotonic() < end:
    for _ in range(int(at_once)):
        sender.send(packets)
    time.sleep(pause_s)
"""


def storm(bench: Bench, dice: random.Random) -> Injection:
    """A flood of datagrams from one core, received on the others: the engine, of one thread here,
    is on one of those. From a shower to all that one core can send."""
    cpus = sorted(os.sched_getaffinity(bench.target.pid))
    sender = dice.choice(cpus)
    seconds, at_once, pause_s = dice.uniform(1.0, 2.5), dice.randint(15, 40), dice.uniform(0, 0.002)
    settings = [str(value) for value in (sender, seconds, at_once, pause_s)]
    with _steered([cpu for cpu in cpus if cpu != sender]):
        flood = subprocess.Popen(
            [sys.executable, "-c", _FLOOD_CODE, *settings], stdout=subprocess.PIPE, text=True
        )
        assert flood.stdout is not None
        if flood.stdout.readline() != "ready\n":
            raise RuntimeError("the flood did not start")
        start_ns = time.monotonic_ns()
        end(flood, seconds)
    return Injection("interrupt_storm", start_ns, time.monotonic_ns())


@contextmanager
def _steered(cpus: list[int]) -> Iterator[None]:
    """What loopback delivers is received on these CPUs."""
    before = _STEERING.read_text()
    _STEERING.write_text(f"{sum(1 << cpu for cpu in cpus):x}")
    try:
        yield
    finally:
        _STEERING.write_text(before)


def _not_steerable(bench: Bench) -> str:
    if not os.access(_STEERING, os.W_OK):
        return f"{_STEERING} cannot be written"
    return "" if len(os.sched_getaffinity(bench.target.pid)) > 1 else "the engine has but one CPU"


INTERRUPT_STORM = Injector(
    Fault("interrupt_storm", frozenset({"cpu.irq"}), "counterfactual", life),
    "smollm2, one thread",
    storm,
    refused=_not_steerable,
)
