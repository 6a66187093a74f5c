"""Questions to a running agent, over its abstract Unix socket `@dsagent/<target pid>`.

One line of JSON each way and a connection a question. The name vanishes with
the process that listens. Anyone on the machine may bind or reach such a name,
so both ends look at who the other one is (SO_PEERCRED): only root and the
agent's own user are answered, and only an agent of root or one's own is asked.
"""

from __future__ import annotations

import errno
import json
import os
import re
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsagent.agent import procfs
from dsagent.agent.errors import CANNOT_ATTACH, FINDINGS, USAGE, DsagentError

MAX_REQUEST_BYTES = 64 << 10
MAX_ANSWER_BYTES = 16 << 20
MAX_CONNECTIONS = 8
CONNECTION_DEADLINE_NS = 5_000_000_000
ASK_TIMEOUT_S = 10.0

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_LISTENING = 0x10000  # __SO_ACCEPTCON in the flags of /proc/net/unix
_NAME = re.compile(r"@dsagent/(\d{1,10})$")


def _address(pid: int) -> str:
    return f"\0dsagent/{pid}"


def _peer_uid(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return int(uid)


def _trusted(uid: int) -> bool:
    return uid in (0, os.geteuid())


class ControlServer:
    """Answers within the session's own loop: registers with its selector, never blocks it."""

    def __init__(self, pid: int, selector: selectors.BaseSelector, handler: Handler) -> None:
        """Raises DsagentError (exit 3) where another agent is attached to `pid`."""
        self._selector = selector
        self._handler = handler
        self._connections: set[_Connection] = set()
        self.refused = 0  # connections of strangers, and those beyond the limit
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            self._socket.bind(_address(pid))
        except OSError as error:
            self._socket.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise DsagentError(
                f"cannot attach: another dsagent is attached to process {pid} already",
                exit_code=CANNOT_ATTACH,
            ) from error
        self._socket.listen(128)  # a full queue refuses at once instead of making callers wait
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def _accept(self, _mask: int) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError:
            return  # it hung up before we got to it
        if len(self._connections) >= MAX_CONNECTIONS or not _trusted(_peer_uid(accepted)):
            self.refused += 1
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(accepted, self._selector, self._handler, self._connections.discard)
        self._connections.add(connection)

    def expire(self, now_ns: int) -> None:
        """Hangs up on those who neither ask nor read."""
        for connection in tuple(self._connections):
            if now_ns > connection.deadline_ns:
                connection.close()

    def close(self) -> None:
        for connection in tuple(self._connections):
            connection.close()
        if self._socket.fileno() >= 0:
            self._selector.unregister(self._socket)
            self._socket.close()


class _Connection:
    def __init__(
        self,
        accepted: socket.socket,
        selector: selectors.BaseSelector,
        handler: Handler,
        on_close: Callable[[_Connection], None],
    ) -> None:
        self._socket = accepted
        self._selector = selector
        self._handler = handler
        self._on_close = on_close
        self._request = bytearray()
        self._answer = memoryview(b"")
        self.deadline_ns = time.monotonic_ns() + CONNECTION_DEADLINE_NS
        selector.register(accepted, selectors.EVENT_READ, self._ready)

    def _ready(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._read()
            elif mask & selectors.EVENT_WRITE:
                self._write()
        except OSError:
            self.close()

    def _read(self) -> None:
        chunk = self._socket.recv(65536)
        self._request += chunk
        line, newline, _ = self._request.partition(b"\n")
        if newline:
            self._answer = memoryview(self._answered(bytes(line)))
            self._selector.modify(self._socket, selectors.EVENT_WRITE, self._ready)
        elif not chunk or len(self._request) > MAX_REQUEST_BYTES:
            self.close()

    def _answered(self, line: bytes) -> bytes:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            return _encode({"error": f"not JSON: {error}", "exit_code": USAGE})
        if not isinstance(request, dict):
            return _encode({"error": "not a JSON object", "exit_code": USAGE})
        try:
            answer = _encode({"answer": self._handler(request)})
        except DsagentError as error:
            return _encode({"error": str(error), "exit_code": error.exit_code})
        except Exception as error:  # noqa: BLE001 - a question must not end the session
            text = f"internal error of the agent: {type(error).__name__}: {error}"
            return _encode({"error": text, "exit_code": FINDINGS})
        if len(answer) > MAX_ANSWER_BYTES:
            return _encode({"error": "the answer is too large", "exit_code": FINDINGS})
        return answer

    def _write(self) -> None:
        sent = self._socket.send(self._answer)
        self._answer = self._answer[sent:]
        if not self._answer:
            self.close()

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._selector.unregister(self._socket)
            self._socket.close()
        self._on_close(self)


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"


def running(proc: Path = procfs.PROC) -> tuple[int, ...]:
    """Target pids of the agents that listen in this network namespace."""
    found = set()
    for line in procfs.read_bytes(proc / "net" / "unix").decode("utf-8", "replace").splitlines():
        fields = line.split()
        name = _NAME.fullmatch(fields[-1]) if len(fields) == 8 else None
        if name and int(fields[3], 16) & _LISTENING:
            found.add(int(name.group(1)))
    return tuple(sorted(found))


def choose(pid: int | None, proc: Path = procfs.PROC) -> int:
    """The target pid of the agent to ask; `pid` may be any process of its target. Raises
    DsagentError (exit 2): none runs, several do and none was named, none watches that one."""
    pids = running(proc)
    if not pids:
        raise DsagentError(
            "no dsagent is running here; start one with `dsagent attach PID`, or give --recording",
            exit_code=USAGE,
        )
    if pid is None:
        if len(pids) > 1:
            listed = ", ".join(map(str, pids))
            raise DsagentError(
                f"several agents are running; name one with --pid: {listed}", exit_code=USAGE
            )
        return pids[0]
    if pid in pids:
        return pid
    parent_of = procfs.parents(proc)
    for other in (*procfs.ancestors(pid, parent_of), *procfs.descendants(pid, parent_of)):
        if other in pids:
            return other
    listed = ", ".join(map(str, pids))
    raise DsagentError(f"no dsagent is attached to process {pid}; to: {listed}", exit_code=USAGE)


def ask(pid: int, request: Mapping[str, Any]) -> Any:
    """One question to the agent attached to `pid`. Raises DsagentError with the agent's own
    message and exit code, or saying why there was no answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(ASK_TIMEOUT_S)
        try:
            connection.connect(_address(pid))
            uid = _peer_uid(connection)
            if not _trusted(uid):
                raise DsagentError(
                    f"what listens as @dsagent/{pid} belongs to user {uid}: not asked",
                    exit_code=USAGE,
                )
            connection.sendall(_encode(request))
            line = _read_line(connection)
        except TimeoutError as error:
            raise DsagentError(f"the agent attached to {pid} does not answer") from error
        except OSError as error:
            raise DsagentError(
                f"cannot ask the agent attached to {pid}: {error.strerror or error}",
                exit_code=USAGE,
            ) from error
    if not line:
        raise DsagentError(
            f"the agent attached to {pid} did not answer; it answers only root and its own user",
            exit_code=USAGE,
        )
    try:
        document = json.loads(line)
    except ValueError as error:
        raise DsagentError(f"the agent attached to {pid} answered no JSON") from error
    if "error" in document:
        raise DsagentError(str(document["error"]), exit_code=int(document.get("exit_code", 1)))
    return document["answer"]


def _read_line(connection: socket.socket) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        chunk = connection.recv(65536)
        if not chunk:
            break
        received += chunk
        if len(received) > MAX_ANSWER_BYTES + 1:
            raise DsagentError("the answer is too large")
    return bytes(received)
