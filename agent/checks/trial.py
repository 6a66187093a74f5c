"""Tries each probe for a moment, on a child of its own: does it work here, what does a run cost.

No target is needed and nothing else is looked at. The kernel times the
programs itself, where it may be asked to.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Target
from dsagent.agent.host.children import dying_with_us
from dsagent.agent.probes import PROBES, Probe
from dsagent.agent.sources.bpf.libbpf import Library
from dsagent.agent.sources.bpf.loader import Loaded, is_absent
from dsagent.agent.sources.kernel import KernelSource, check

State = Literal["ok", "unavailable", "failed"]

_LONGEST_S = 20.0
# Something of everything that can be had without harm: switches, locks, threads, a process, page
# faults, a block device, a connection.
_WORK = """
import mmap, os, socket, sys, tempfile, threading, time
print("ready", flush=True)
sys.stdin.readline()
def hold(lock, turns):
    for _ in range(turns):
        with lock:
            time.sleep(0.0002)
lock = threading.Lock()
threads = [threading.Thread(target=hold, args=(lock, 50)) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
if os.fork() == 0:
    os.execv("/bin/true", ["true"])
os.wait()
with tempfile.TemporaryFile() as file:
    file.write(bytes(64 * mmap.PAGESIZE))
    file.flush()
    os.fsync(file.fileno())
    memory = mmap.mmap(file.fileno(), 0)
    memory[::mmap.PAGESIZE]
    memory.madvise(21)  # MADV_PAGEOUT
    memory[::mmap.PAGESIZE]
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
served = server.accept()[0]
for _ in range(50):
    client.sendall(b"x")
    served.recv(1)
client.close()
end = time.monotonic() + 0.1
while time.monotonic() < end:
    pass
print("done", flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True, slots=True)
class Tried:
    """`cost_ns`: CPU time of one run of its programs; None where none ran or nobody timed it."""

    probe: Probe
    state: State
    reason: str = ""
    cost_ns: int | None = None
    tier: str = ""  # "": the probe's own

    def to_json(self) -> dict[str, str | int | None]:
        return {
            "name": self.probe.name,
            "tier": self.tier or self.probe.tier,
            "state": self.state,
            "reason": self.reason,
            "measures": self.probe.measures,
            "cost_ns": self.cost_ns,
        }


def try_probes() -> list[Tried]:
    """All of them, in the order of the table."""
    try:
        check()
    except SourceUnavailable as error:
        return [Tried(probe, "unavailable", str(error)) for probe in PROBES]
    with subprocess.Popen(
        dying_with_us([sys.executable, "-S", "-c", _WORK]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it is the child itself now, and ready
        source = KernelSource(Target(child.pid, 0, 0, "trial", (), "reference"), {}, tier="full")
        try:
            source.start()
            assert source.loaded is not None
            stats_fd = Library().enable_run_stats()
            try:
                _work(child, source)
            finally:
                if stats_fd is not None:
                    os.close(stats_fd)
            return [_tried(probe, source.loaded) for probe in PROBES]
        except SourceUnavailable as error:
            return [Tried(probe, "failed", str(error)) for probe in PROBES]
        finally:
            source.stop()
            child.kill()


def _work(child: subprocess.Popen[str], source: KernelSource) -> None:
    """Let the child do its work, reading what it gives as the agent would."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    until = time.monotonic() + _LONGEST_S
    while not select.select([child.stdout], [], [], 0.02)[0] and time.monotonic() < until:
        source.poll(time.monotonic_ns())


def _tried(probe: Probe, loaded: Loaded) -> Tried:
    if reason := loaded.why_not(probe):
        return Tried(probe, "unavailable" if is_absent(reason) else "failed", reason)
    way = next(way for way in probe.ways if not any(name in loaded.missing for name in way))
    runs = [loaded.runs(name) for name in way]
    count, ns = sum(run[0] for run in runs), sum(run[1] for run in runs)
    return Tried(probe, "ok", cost_ns=ns // count if count else None)
