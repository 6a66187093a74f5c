"""Tries the probes that `--instrument outside` loads, on a child of its own, as trial.py does."""

from __future__ import annotations

import os
import subprocess
import sys

from dsagent.agent.checks.trial import Tried
from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.host.children import dying_with_us
from dsagent.agent.probes import OUTSIDE_PROBES, Probe
from dsagent.agent.sources.bpf.libbpf import Library
from dsagent.agent.sources.bpf.loader import is_absent
from dsagent.agent.sources.kernel import check
from dsagent.agent.sources.outside.capture import Capture
from dsagent.agent.sources.outside.markers import find_function

TIER = "outside"
# A few requests on one connection, and calls of a function that any libc has.
_WORK = """
import os, socket, sys, time
print("ready", flush=True)
sys.stdin.readline()
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
served = server.accept()[0]
for _ in range(50):
    client.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    served.recv(4096)
    served.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
    client.recv(4096)
client.close()
for _ in range(50):
    os.sched_yield()
    time.sleep(0.001)
print("done", flush=True)
sys.stdin.readline()
"""


def try_outside() -> list[Tried]:
    """In the order of the table."""
    try:
        check()
    except SourceUnavailable as error:
        return [_failed(probe, str(error), "unavailable") for probe in OUTSIDE_PROBES]
    with subprocess.Popen(
        dying_with_us([sys.executable, "-S", "-c", _WORK]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it is the child itself now, and ready
        try:
            capture = Capture()
        except SourceUnavailable as error:
            return [_failed(probe, str(error)) for probe in OUTSIDE_PROBES]
        try:
            return _tried(child, capture)
        except SourceUnavailable as error:
            return [_failed(probe, str(error)) for probe in OUTSIDE_PROBES]
        finally:
            capture.close()
            child.kill()


def _tried(child: subprocess.Popen[str], capture: Capture) -> list[Tried]:
    assert child.stdin is not None and child.stdout is not None
    capture.follow([child.pid])
    capture.attach()
    place = find_function(child.pid, "libc.so", "sched_yield")
    refused = ["no libc was found to try it on"] if place is None else capture.mark([place], None)
    stats_fd = Library().enable_run_stats()
    try:
        child.stdin.write("go\n")
        child.stdin.flush()
        child.stdout.readline()
    finally:
        if stats_fd is not None:
            os.close(stats_fd)
    found = []
    for probe in OUTSIDE_PROBES:
        runs = [capture.runs(name) for name in probe.ways[0]]
        count, ns = sum(run[0] for run in runs), sum(run[1] for run in runs)
        if refused and "on_mark" in probe.ways[0]:
            found.append(_failed(probe, refused[0]))
        else:
            cost_ns = ns // count if count else None
            found.append(Tried(probe, "ok", cost_ns=cost_ns, tier=TIER))
    return found


def _failed(probe: Probe, reason: str, state: str = "") -> Tried:
    absent = state == "unavailable" or is_absent(reason)
    return Tried(probe, "unavailable" if absent else "failed", reason, tier=TIER)
