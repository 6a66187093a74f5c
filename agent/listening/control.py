"""Questions to a running agent, over its abstract Unix socket `@dsagent/<target pid>`; a sidecar,
which watches several, has `@dsagent/sidecar` too.

One line of JSON each way and a connection a question. The name vanishes with
the process that listens. Anyone on the machine may bind or reach such a name,
so both ends look at who the other one is (SO_PEERCRED): only root and the
agent's own user are answered, and only an agent of root or one's own is asked.
A name held by somebody else is no agent: it is left out wherever one is chosen.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from dsagent.agent.errors import CANNOT_ATTACH, FINDINGS, USAGE, DsagentError
from dsagent.agent.host import privileges, procfs

MAX_REQUEST_BYTES = 64 << 10
MAX_ANSWER_BYTES = 16 << 20
MAX_CONNECTIONS = 8
CONNECTION_DEADLINE_NS = 5_000_000_000
ASK_TIMEOUT_S = 10.0
MAX_LISTED = 10
ANSWERS_ONLY = "it answers only root and its own user; ask as one of them"

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_LISTENING = 0x10000  # __SO_ACCEPTCON in the flags of /proc/net/unix
_NAME = re.compile(r"@dsagent/(\d{1,10})$")
_FLAGS = re.compile(r"[0-9A-F]{8}")

SIDECAR: Literal["sidecar"] = "sidecar"
Name = int | Literal["sidecar"]  # whom to ask: the agent of one target, or the sidecar


def _address(name: Name) -> str:
    return f"\0dsagent/{name}"


def _who(name: Name) -> str:
    return "the sidecar" if name == SIDECAR else f"the agent attached to {name}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end; pid 0 where it is in a pid namespace that is not ours."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return int(pid), int(uid)


def _peer_uid(connection: socket.socket) -> int:
    return _peer(connection)[1]


def _trusted(uid: int) -> bool:
    return uid in (0, os.geteuid())


class Unreachable(DsagentError):  # noqa: N818 - what was found, not what went wrong
    """There is no agent that would answer us: asking again is no use."""


class TakenElsewhere(DsagentError):  # noqa: N818 - what was found, not what went wrong
    """Somebody in another pid namespace has the name: what is watched there is another process."""


class ControlServer:
    """Answers within the session's own loop: registers with its selector, never blocks it."""

    def __init__(self, name: Name, selector: selectors.BaseSelector, handler: Handler) -> None:
        """`name`: the target's pid. Raises DsagentError (exit 3) where another agent has it,
        TakenElsewhere where that one lives in another pid namespace."""
        self._selector = selector
        self._handler = handler
        self._connections: set[_Connection] = set()
        self.refused = 0  # connections of strangers, and those beyond the limit
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            self._socket.bind(_address(name))
        except OSError as error:
            self._socket.close()
            if error.errno != errno.EADDRINUSE:
                raise
            holder = _listener(name)
            kind = TakenElsewhere if holder is not None and not holder[0] else DsagentError
            uid = None if holder is None else holder[1]
            raise kind(_taken(name, uid), exit_code=CANNOT_ATTACH) from error
        self._socket.listen(128)  # a full queue refuses at once instead of making callers wait
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def _accept(self, _mask: int) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.01)  # it is still there: asking again at once would be all we did
            return  # or it hung up before we got to it
        accepted.setblocking(False)
        if not _trusted(_peer_uid(accepted)):
            self._refuse(accepted, ANSWERS_ONLY, USAGE)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._refuse(accepted, "it is busy, try again", FINDINGS)
            return
        connection = _Connection(accepted, self._selector, self._handler, self._connections.discard)
        self._connections.add(connection)

    def _refuse(self, accepted: socket.socket, why: str, exit_code: int) -> None:
        self.refused += 1
        with accepted, suppress(OSError):  # it need not wait for our word
            accepted.send(
                _encode({"error": f"the agent did not answer: {why}", "exit_code": exit_code})
            )

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
        # A socket's name may hold line breaks: whoever made it chose what stands in this line.
        if name and _FLAGS.fullmatch(fields[3]) and int(fields[3], 16) & _LISTENING:
            found.add(int(name.group(1)))
    return tuple(sorted(found))


def _listener(name: Name) -> tuple[int, int] | None:
    """(pid, uid) of who listens as @dsagent/`name`; None where nobody does, or nobody accepts."""
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    ) as connection:
        try:
            connection.connect(_address(name))
            return _peer(connection)
        except OSError:
            return None


def owner(name: Name) -> int | None:
    """The uid of who listens as @dsagent/`name`; None where nobody does, or nobody accepts."""
    found = _listener(name)
    return None if found is None else found[1]


def _is_the_sidecars(pid: int) -> bool:
    """Whether the agent of this target is the sidecar itself: it knows more than its part does."""
    one, sidecar = _listener(pid), _listener(SIDECAR)
    return one is not None and one == sidecar and one[0] > 0


def _taken(name: Name, uid: int | None) -> str:
    """Why a name cannot be had, and how to go on."""
    cannot = "cannot answer questions" if name == SIDECAR else "cannot attach"
    if uid is not None and _trusted(uid):
        if name == SIDECAR:
            return f"{cannot}: another sidecar runs in this network namespace"
        return f"{cannot}: another dsagent is attached to process {name} already"
    whose = "a process that does not listen" if uid is None else privileges.user_name(uid)
    number = "" if uid is None else f" (uid {uid})"
    return (
        f"{cannot}: the socket @dsagent/{name} is held by {whose}{number}; end the process that "
        f"`ss -xap | grep @dsagent/{name}` names, then attach again"
    )


def choose(
    pid: int | None,
    proc: Path = procfs.PROC,
    *,
    or_else: str = ", or give --recording",
    owner_of: Callable[[Name], int | None] = owner,
    of_sidecar: Callable[[int], bool] = _is_the_sidecars,
) -> Name:
    """Whom to ask; `pid` may be any process or thread of the target of an agent. A sidecar knows
    all of its engines, those that have ended too: it is asked unless `pid` has an agent of its
    own. Raises DsagentError (exit 2): none runs, several do and none was named, none watches that
    one. Our own agents come first, then root's; what others run is left out. `or_else`: what
    else there is to do where none runs."""
    has_sidecar = (uid := owner_of(SIDECAR)) is not None and _trusted(uid)
    if pid is None and has_sidecar:
        return SIDECAR
    if pid is not None:
        pid = procfs.process_of(pid, proc)
        if (uid := owner_of(pid)) is not None and _trusted(uid):
            return SIDECAR if has_sidecar and of_sidecar(pid) else pid
    owners = {each: owner_of(each) for each in running(proc)}
    pids = [each for each, uid in owners.items() if uid is not None and _trusted(uid)]
    if not pids and has_sidecar:
        return SIDECAR
    if not pids:
        others = "; those of other users are not asked" if owners else ""
        raise DsagentError(
            f"no dsagent is running here; start one with `dsagent attach PID`{or_else}{others}",
            exit_code=USAGE,
        )
    if pid is None:
        own = [each for each in pids if owners[each] == os.geteuid()] or pids
        if len(own) > 1:
            raise DsagentError(
                f"several servers are watched; choose one by its pid with --pid: {_listed(own)}",
                exit_code=USAGE,
            )
        return own[0]
    parent_of = procfs.parents(proc)
    for other in (*procfs.ancestors(pid, parent_of), *procfs.descendants(pid, parent_of)):
        if other in pids:
            return SIDECAR if has_sidecar and of_sidecar(other) else other
    if has_sidecar:
        return SIDECAR
    raise DsagentError(
        f"no dsagent is attached to process {pid}; to: {_listed(pids)}", exit_code=USAGE
    )


def _listed(pids: Sequence[int]) -> str:
    more = f" and {len(pids) - MAX_LISTED} more" if len(pids) > MAX_LISTED else ""
    return ", ".join(map(str, pids[:MAX_LISTED])) + more


def ask(name: Name, request: Mapping[str, Any]) -> Any:
    """One question to the agent of that name. Raises DsagentError with the agent's own
    message and exit code, or saying why there was no answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(ASK_TIMEOUT_S)
        try:
            connection.connect(_address(name))
            uid = _peer_uid(connection)
            if not _trusted(uid):
                raise Unreachable(
                    f"what listens as @dsagent/{name} belongs to user {uid}: not asked",
                    exit_code=USAGE,
                )
            if os.geteuid() not in (0, uid):
                raise Unreachable(
                    f"{_who(name)} is {privileges.user_name(uid)}'s: {ANSWERS_ONLY}",
                    exit_code=USAGE,
                )
            with suppress(ConnectionError):  # hung up on, perhaps with a word that says why
                connection.sendall(_encode(request))
            line = _read_line(connection)
        except BlockingIOError as error:
            raise DsagentError(f"{_who(name)} is busy, try again") from error
        except TimeoutError as error:
            raise DsagentError(f"{_who(name)} does not answer") from error
        except OSError as error:
            raise Unreachable(
                f"cannot ask {_who(name)}: {error.strerror or error}",
                exit_code=USAGE,
            ) from error
    if not line:
        raise DsagentError(f"{_who(name)} hung up: it has ended, or try again")
    try:
        document = json.loads(line)
    except ValueError as error:
        raise DsagentError(f"{_who(name)} answered no JSON") from error
    if "error" in document:
        raise DsagentError(str(document["error"]), exit_code=int(document.get("exit_code", 1)))
    return document["answer"]


def _read_line(connection: socket.socket) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        try:
            chunk = connection.recv(65536)
        except ConnectionError:
            chunk = b""
        if not chunk:
            break
        received += chunk
        if len(received) > MAX_ANSWER_BYTES + 1:
            raise DsagentError("the answer is too large")
    return bytes(received)
