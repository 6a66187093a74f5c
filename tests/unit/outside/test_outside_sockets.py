"""Where processes listen, and which tree of them is a server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dsagent.agent.errors import DsagentError
from dsagent.agent.host import sockets
from dsagent.agent.host.server_target import find_target, resolve_server

_PARENT = """
import socket, subprocess, sys
listener = socket.create_server(("127.0.0.1", 0)) if sys.argv[1] == "listens" else None
child = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[2], *sys.argv[3:]],
                         pass_fds=[listener.fileno()] if listener else [], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
"""
_SHARES = "import sys; sys.stdin.read()"
_OWN = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); sys.stdin.read()"


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(parent, child)."""
    how, child = request.param
    command = [sys.executable, "-S", "-c", _PARENT, how, child]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdin is not None
        yield run.pid, int(run.stdout.readline())
        run.stdin.close()


def test_own_sockets_are_found() -> None:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
        with socket.socket(family) as one:
            one.bind((address, 0))
            assert one.getsockname()[1] not in {s.port for s in sockets.listening(os.getpid())}
            one.listen()
            found = {s.port: s for s in sockets.listening(os.getpid())}
            assert found[one.getsockname()[1]].address == address


@pytest.mark.parametrize("pair", [("listens", _SHARES)], indirect=True)
def test_who_shares_a_socket_belongs_together(pair: tuple[int, int]) -> None:
    parent, child = pair
    for pid in pair:
        target = resolve_server(pid)
        assert (target.pid, target.engine) == (parent, "http")
    assert child in target.children


@pytest.mark.parametrize("pair", [("not", _OWN)], indirect=True)
def test_a_launcher_is_followed_down(pair: tuple[int, int]) -> None:
    parent, child = pair
    while not sockets.listening(child):
        pass
    assert resolve_server(parent).pid == child
    assert find_target(child, "auto", print).pid == child


@pytest.mark.parametrize("pair", [("not", _SHARES)], indirect=True)
def test_what_does_not_listen_is_no_server(pair: tuple[int, int]) -> None:
    # Nobody above may listen either: the test runner's own sockets would make it the server.
    if any(sockets.listening(pid) for pid in (os.getpid(), os.getppid())):
        pytest.skip("the test runner listens")
    with pytest.raises(DsagentError, match="is no server"):
        resolve_server(pair[1])
