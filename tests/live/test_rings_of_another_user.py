"""The rings of another user's process, read with CAP_SYS_PTRACE and no other capability: what
uid 0 has in a container, to whom fd, environ and io of an engine of uid 1000 are closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

USER = 65_534
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# It becomes the other user itself: an interpreter below /root could not be started by one.
ENGINE = f"""
import ctypes, os, socket, sys
from dsagent.instrumentation.ring import RingWriter, Role
os.setgroups([])
os.setresgid({USER}, {USER}, {USER})
os.setresuid({USER}, {USER}, {USER})
ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: as one that was this user's from the start
ring = RingWriter(role=Role.SCHEDULER, engine_id=7, capacity_bytes=128 << 10)
decoy = os.memfd_create("decoy")
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""

READER = """
import json, os, sys
from dsagent.agent.host import procfs, sockets
from dsagent.agent.host.environment import environment
from dsagent.agent.sources.proc import read_process
from dsagent.instrumentation.ring import RingReader, find_rings
pid = int(sys.argv[1])
before = os.listdir("/proc/self/fd")
try:
    os.listdir(f"/proc/{pid}/fd")
    raise SystemExit("its descriptors are open to us: nothing is shown by reading them")
except PermissionError:
    pass
try:
    rings = find_rings(pid)
except PermissionError:
    raise SystemExit("not permitted")
readers = [RingReader.open(ring) for ring in rings]
told = {
    "engines": [reader.header.engine_id for reader in readers],
    "header": environment(pid)["DSAGENT_TENANT_HEADER"],
    "ports": [each.port for each in sockets.listening(pid)],
    "gauges": sorted(read_process(pid).gauges),
}
for reader in readers:
    reader.close()
told["left_open"] = len(os.listdir("/proc/self/fd")) - len(before)
print(json.dumps(told))
"""


@pytest.fixture
def engine() -> Iterator[tuple[int, int]]:
    """(pid, port) of a process of another user with one ring."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "DSAGENT_TENANT_HEADER": "x-team"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline()
        assert port, "the process did not make its ring"
        yield process.pid, int(port)
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def read_with(capabilities: str, pid: int) -> subprocess.CompletedProcess[str]:
    limits = (f"--bounding-set=-all{capabilities}", "--inh-caps=-all", "--no-new-privs")
    return subprocess.run(
        ["setpriv", *limits, sys.executable, "-c", READER, str(pid)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_who_may_trace_it_finds_its_rings_sockets_and_environment(engine: tuple[int, int]) -> None:
    pid, port = engine
    done = read_with(",+sys_ptrace", pid)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["engines"] == [7]
    assert told["ports"] == [port]
    assert told["header"] == "x-team"
    assert "process.unix.file_descriptor.count" in told["gauges"]
    assert told["left_open"] == 0


def test_who_may_not_is_told_so(engine: tuple[int, int]) -> None:
    done = read_with(",+bpf,+perfmon", engine[0])
    assert (done.returncode, done.stderr.strip()) == (1, "not permitted")
