"""Whatever pid is given: one clear line, the right exit code, no traceback, no hang."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from shell_lab import Agent, Engine, dsagent

from dsagent.agent.checks.engines_here import engines_here
from dsagent.agent.errors import CANNOT_ATTACH, DsagentError
from dsagent.agent.host import procfs
from dsagent.agent.host.target import resolve
from dsagent.agent.session.loop import Session
from dsagent.agent.sidecar.scanner import Scanner
from dsagent.instrumentation import layout

RING_HOLDER = """
import os, sys
fd = os.memfd_create("dsagent.steps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.write(fd, sys.stdin.buffer.read())
if sys.argv[1] == "sealed":
    import fcntl
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
print("ready", flush=True)
import time
while True:
    time.sleep(60)
"""


def refused(pid: int) -> str:
    ran = dsagent("attach", str(pid), check=False)
    assert ran.returncode == CANNOT_ATTACH, ran.stderr
    assert ran.stdout == ""
    lines = ran.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("dsagent: cannot attach: ")
    return lines[0]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


NO_PID = "3999999999"
LISTENER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print("ready", flush=True)
sys.stdin.read()
"""


def test_whoever_has_no_pid_is_told_which_engines_run_here(
    sleeper: subprocess.Popen[bytes],
) -> None:
    listens = [sys.executable, "-c", LISTENER, "llama-server"]
    with (
        Engine(more=["known-by-this"]) as engine,
        subprocess.Popen(listens, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server,
    ):
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        found = {each.pid: each for each in engines_here(Scanner(own_pid=0))}
        inject = ("--instrument", "inject", "--yes")
        asked = [(), (str(sleeper.pid),), (str(sleeper.pid), *inject), (NO_PID, *inject)]
        said = [dsagent("attach", *each, check=False) for each in asked]
        server.kill()
    rings, outside = found[engine.engine_pid], found[server.pid]
    assert rings.way_in == "rings"
    assert rings.command.startswith("python")
    assert rings.command.endswith(" shell_engine.py 3.0 known-by-this")
    assert outside.way_in == "outside"
    assert outside.command.startswith("python")
    assert sleeper.pid not in found
    assert [ran.returncode for ran in said] == [2, *[CANNOT_ATTACH] * 3]
    for ran in said:
        assert "; engines here: " in ran.stderr
        assert ran.stderr.count("\n") == 1


def test_no_such_process_no_engine_a_zombie(sleeper: subprocess.Popen[bytes]) -> None:
    assert "is not an engine" in refused(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert "a zombie" in refused(sleeper.pid)
    sleeper.wait()
    assert f"there is no process {sleeper.pid}" in refused(sleeper.pid)


def ring(content: bytes, *, sealed: bool) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", RING_HOLDER, "sealed" if sealed else "open"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(content)
    process.stdin.close()
    assert process.stdout.readline() == b"ready\n"
    return process


SIZE = layout.HEADER_BYTES + layout.MIN_CAPACITY_BYTES
OTHER_VERSION = struct.pack("<QII", layout.MAGIC, 99, 2).ljust(SIZE, b"\0")


@pytest.mark.parametrize(
    ("content", "sealed", "message"),
    [
        (OTHER_VERSION, True, "it has version 99"),
        (OTHER_VERSION, False, "it is not sealed"),
        (b"\xa5" * SIZE, True, "its header is not a ring's"),
        (b"short", True, "its size is 5 bytes"),
        (b"", True, "its size is 0 bytes"),
    ],
    ids=["version", "unsealed", "garbage", "truncated", "empty"],
)
def test_rings_that_are_none(content: bytes, sealed: bool, message: str) -> None:
    process = ring(content, sealed=sealed)
    try:
        assert message in refused(process.pid)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_launcher_is_followed_down_to_its_worker() -> None:
    with (
        Engine(under=["sh", "-c", 'exec 3<&0; "$@" <&3 & wait', "launcher"]) as engine,
        Agent(engine.pid, "--json", "--duration", "0.5") as agent,
    ):
        assert engine.engine_pid != engine.pid
        assert f"(pid {engine.engine_pid})" in agent.attached().err[-1]
        assert agent.wait() == 0
        assert agent.document()["target"]["pid"] == engine.engine_pid


def test_a_thread_leads_to_its_process() -> None:
    with Engine() as engine:
        (thread, *_) = set(procfs.threads(engine.pid)) - {engine.pid}
        assert resolve(thread).pid == engine.pid
        with Agent(thread, "--json", "--duration", "0.2") as agent:
            assert agent.wait() == 0
            assert agent.document()["target"]["pid"] == engine.pid


def test_it_dies_while_attaching() -> None:
    with Engine() as engine:
        target = resolve(engine.pid)
        session = Session(target)
        engine.signal(signal.SIGKILL)
        engine.wait()
        with pytest.raises(DsagentError, match="ended while attaching") as raised:
            session.run()
    assert raised.value.exit_code == CANNOT_ATTACH


def test_somebody_elses_process(sleeper: subprocess.Popen[bytes]) -> None:
    """Tried by a child without privileges: the interpreter itself may be root's alone."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        try:
            resolve(sleeper.pid)
            said = "it was let in"
        except DsagentError as error:
            said = f"{error.exit_code} {error}"
        os.write(write_fd, said.encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    assert said.startswith("3 cannot attach: not permitted")
    assert "which belongs to root; run dsagent as root" in said
