"""The control socket: its answers, its bounds, and who gets none."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsagent.agent import control
from dsagent.agent.control import ControlServer
from dsagent.agent.errors import CANNOT_ATTACH, USAGE, DsagentError

PID = 3_900_000_000 + os.getpid()  # no pid is that large: no agent of this machine is in the way


def handle(request: Mapping[str, Any]) -> Mapping[str, Any]:
    if request.get("op") == "fail":
        raise DsagentError("no such request", exit_code=USAGE)
    if request.get("op") == "bug":
        raise KeyError("surprise")
    if request.get("op") == "large":
        return {"text": "x" * (control.MAX_ANSWER_BYTES + 1)}
    return {"echo": request, "filler": "y" * 3_000_000}


class Loop:
    """A session's loop, in a thread."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.server = ControlServer(PID, self.selector, handle)
        self.now_ns = 0
        self._wake = os.eventfd(0)
        self.selector.register(self._wake, selectors.EVENT_READ, lambda _mask: None)
        self._ending = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            for key, mask in self.selector.select(0.05):
                key.data(mask)
            self.server.expire(self.now_ns)

    def close(self) -> None:
        self._ending = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self.server.close()
        self.selector.close()
        os.close(self._wake)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def raw(data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(f"\0dsagent/{PID}")
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while chunk := connection.recv(1 << 20):
            received += chunk
        return received


def test_question_and_answer_larger_than_the_socket_buffer(loop: Loop) -> None:
    answer = control.ask(PID, {"op": "echo", "id": "ü"})
    assert answer["echo"] == {"op": "echo", "id": "ü"}
    assert len(answer["filler"]) == 3_000_000


def test_errors_travel_with_their_exit_code(loop: Loop) -> None:
    with pytest.raises(DsagentError, match="no such request") as raised:
        control.ask(PID, {"op": "fail"})
    assert raised.value.exit_code == USAGE
    with pytest.raises(DsagentError, match="internal error of the agent: KeyError: 'surprise'"):
        control.ask(PID, {"op": "bug"})
    with pytest.raises(DsagentError, match="the answer is too large"):
        control.ask(PID, {"op": "large"})


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff\xfe", b"[" * 60_000, b"null"])
def test_garbage_is_answered_as_such(loop: Loop, line: bytes) -> None:
    assert "not" in json.loads(raw(line + b"\n"))["error"]
    assert control.ask(PID, {"op": "echo"})["echo"] == {"op": "echo"}


def test_a_request_without_end_is_hung_up_on(loop: Loop) -> None:
    with pytest.raises((ConnectionError, BrokenPipeError)):
        assert raw(b"x" * (4 * control.MAX_REQUEST_BYTES)) == b""
        raise ConnectionError  # hung up in order: just as well
    assert raw(b"") == b""
    assert control.ask(PID, {"op": "echo"})["echo"] == {"op": "echo"}


def test_silent_connections_are_limited_and_expire(loop: Loop) -> None:
    idle = []
    for _ in range(control.MAX_CONNECTIONS + 2):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(10)
        connection.connect(f"\0dsagent/{PID}")
        idle.append(connection)
    assert idle[-1].recv(1) == b""
    assert loop.server.refused == 2
    loop.now_ns = 1 << 62
    assert [connection.recv(1) for connection in idle] == [b""] * len(idle)
    for connection in idle:
        connection.close()


def test_strangers_are_refused(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers' uids come from the kernel; here both ends are told that the other is 4711."""
    monkeypatch.setattr(control, "_peer_uid", lambda _connection: 4711)
    with pytest.raises(DsagentError, match="belongs to user 4711: not asked"):
        control.ask(PID, {"op": "echo"})
    assert raw(b'{"op": "echo"}\n') == b"" if loop.server.refused else True


def test_one_agent_a_target(loop: Loop) -> None:
    with (
        selectors.DefaultSelector() as selector,
        pytest.raises(DsagentError, match="another dsagent is attached") as raised,
    ):
        ControlServer(PID, selector, handle)
    assert raised.value.exit_code == CANNOT_ATTACH


def test_nobody_listens() -> None:
    with pytest.raises(DsagentError, match="cannot ask the agent") as raised:
        control.ask(PID, {"op": "echo"})
    assert raised.value.exit_code == USAGE


def unix_table(proc: Path, *pids: int) -> None:
    lines = ["Num       RefCount Protocol Flags    Type St Inode Path"]
    for pid in pids:
        lines.append(f"0000000000000000: 00000002 00000000 00010000 0001 01 12 @dsagent/{pid}")
        lines.append(f"0000000000000000: 00000003 00000000 00000000 0001 03 13 @dsagent/{pid}")
    lines.append("0000000000000000: 00000003 00000000 00000000 0001 03 14 @dsagent/666")
    lines.append("0000000000000000: 00000002 00000000 00010000 0001 01 15 @dsagent/x y")
    lines.append("0000000000000000: 00000002 00000000 00010000 0001 01 16")
    (proc / "net").mkdir(exist_ok=True)
    (proc / "net" / "unix").write_text("\n".join(lines) + "\n")


def test_choosing_among_the_running(tmp_path: Path) -> None:
    for pid, ppid in ((20, 1), (21, 20), (30, 1)):
        (tmp_path / str(pid)).mkdir()
        fields = f"S {ppid} " + "0 " * 17 + "5 0 0 0\n"
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) {fields}")
    unix_table(tmp_path)
    with pytest.raises(DsagentError, match="no dsagent is running here"):
        control.choose(None, tmp_path)
    unix_table(tmp_path, 20)
    assert control.choose(None, tmp_path) == 20
    assert control.choose(21, tmp_path) == 20  # a process of its target
    unix_table(tmp_path, 20, 30)
    with pytest.raises(DsagentError, match="name one with --pid: 20, 30"):
        control.choose(None, tmp_path)
    assert control.choose(30, tmp_path) == 30
    with pytest.raises(DsagentError, match="no dsagent is attached to process 5; to: 20, 30"):
        control.choose(5, tmp_path)
