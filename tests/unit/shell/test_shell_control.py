"""The control socket: its answers, its bounds, and who gets none."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsagent.agent.errors import CANNOT_ATTACH, USAGE, DsagentError
from dsagent.agent.listening import control
from dsagent.agent.listening.control import ControlServer, Unreachable

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
    assert b"it is busy, try again" in idle[-1].recv(1000)
    assert loop.server.refused == 2
    with pytest.raises(DsagentError, match="it is busy, try again"):
        control.ask(PID, {"op": "echo"})
    loop.now_ns = 1 << 62
    held_on = idle[: control.MAX_CONNECTIONS]
    assert [connection.recv(1) for connection in held_on] == [b""] * len(held_on)
    for connection in idle:
        connection.close()


def test_strangers_are_refused(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers' uids come from the kernel; here both ends are told that the other is 4711."""
    monkeypatch.setattr(control, "_peer_uid", lambda _connection: 4711)
    with pytest.raises(DsagentError, match="belongs to user 4711: not asked"):
        control.ask(PID, {"op": "echo"})
    with pytest.raises(Unreachable, match="cannot ask the agent"):
        control.ask(PID + 1, {"op": "echo"})


@contextmanager
def stranger(then: Callable[[], str]) -> Iterator[str]:
    """What `then` says in a process of nobody's, which is there until the end of the block."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_fd)
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        try:
            said = then()
        except DsagentError as error:
            said = f"{error.exit_code} {error}"
        except BaseException as error:  # noqa: BLE001 - pytest must not go on in the child
            said = repr(error)
        os.write(write_fd, said.encode() + b"\n")
        while True:
            signal.pause()
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as answer:
            yield answer.readline().rstrip("\n")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def first_word() -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(f"\0dsagent/{PID}")
        return connection.recv(1000).decode().rstrip()


def test_another_user_is_told_so(loop: Loop) -> None:
    with stranger(lambda: str(control.ask(PID, {"op": "echo"}))) as said:
        assert said == (
            f"2 the agent attached to {PID} is root's: it answers only root and its own user; "
            "ask as one of them"
        )
    with stranger(first_word) as said:  # whatever it asks, or does not
        assert "it answers only root and its own user" in json.loads(said)["error"]


def squat(pid: int, listens: bool) -> Callable[[], str]:
    def hold() -> str:
        global held  # noqa: PLW0603 - for as long as the child lives
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        held.bind(f"\0dsagent/{pid}")
        if listens:
            held.listen()
        return "held"

    return hold


held: socket.socket


def owner_but_of_a_sidecar(name: control.Name) -> int | None:
    """One that runs on this machine would be asked instead."""
    return None if name == control.SIDECAR else control.owner(name)


@pytest.mark.parametrize("listens", [True, False])
def test_a_name_held_by_a_stranger_is_no_agent(listens: bool) -> None:
    with stranger(squat(PID, listens)) as said:
        assert said == "held"
        assert (PID in control.running()) is listens
        with pytest.raises(DsagentError, match=r"no dsagent is (running|attached)") as raised:
            control.choose(PID, owner_of=owner_but_of_a_sidecar)
        assert raised.value.exit_code == USAGE
        whose = r"nobody \(uid 65534\)" if listens else "a process that does not listen"
        with (
            selectors.DefaultSelector() as selector,
            pytest.raises(DsagentError, match=f"is held by {whose}; end the process") as raised,
        ):
            ControlServer(PID, selector, handle)
        assert raised.value.exit_code == CANNOT_ATTACH


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


def test_choosing_among_the_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, ppid in ((20, 1), (21, 20), (30, 1)):
        (tmp_path / str(pid)).mkdir()
        fields = f"S {ppid} " + "0 " * 17 + "5 0 0 0\n"
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) {fields}")
    (tmp_path / "2121").mkdir()
    (tmp_path / "2121" / "status").write_text("Name:\tx\nTgid:\t21\nPid:\t2121\n")
    owners = {20: 0, 30: 0, 40: 4711, 50: None}

    def choose(pid: int | None) -> int:
        return control.choose(pid, tmp_path, owner_of=owners.get)

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    unix_table(tmp_path)
    with pytest.raises(DsagentError, match=r"no dsagent is running here.*--recording$"):
        choose(None)
    unix_table(tmp_path, 40, 50)
    with pytest.raises(DsagentError, match=r"no dsagent is running here.* are not asked"):
        choose(None)
    unix_table(tmp_path, 20, 40, 50)
    assert choose(None) == 20
    assert choose(21) == 20  # a process of its target
    assert choose(2121) == 20  # a thread of that
    unix_table(tmp_path, 20, 30, 40, 50)
    with pytest.raises(DsagentError, match=r"choose one by its pid with --pid: 20, 30$"):
        choose(None)
    assert choose(30) == 30
    with pytest.raises(DsagentError, match=r"no dsagent is attached to process 40; to: 20, 30$"):
        choose(40)
    owners[30] = 1000
    assert choose(None) == 30  # one's own before root's
    assert choose(20) == 20
    unix_table(tmp_path, *range(100, 120))
    owners |= dict.fromkeys(range(100, 120), 0)
    with pytest.raises(DsagentError, match=r"108, 109 and 10 more$"):
        choose(None)


IN_ANOTHER_NAMESPACE = """
import selectors, sys
from dsagent.agent.listening import control
try:
    control.ControlServer(int(sys.argv[1]), selectors.DefaultSelector(), dict)
except control.TakenElsewhere as error:
    print("elsewhere:", error)
except control.DsagentError as error:
    print("here:", error)
"""


def test_a_name_held_in_another_pid_namespace_is_told_apart(loop: Loop) -> None:
    """Pods in the host's network share its abstract sockets, and count their pids alike."""
    unshare = ["unshare", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespace can be had here")
    bind = [sys.executable, "-c", IN_ANOTHER_NAMESPACE, str(PID)]
    for under, expected in (([], "here: "), (unshare, "elsewhere: ")):
        ran = subprocess.run(
            [*under, *bind], capture_output=True, text=True, check=True, timeout=60
        )
        assert ran.stdout.startswith(f"{expected}cannot attach: another dsagent is attached")
