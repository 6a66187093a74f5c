"""OTLP over HTTP with protobuf: POST /v1/traces. One thread, one selector, few connections.

Every connection has a deadline: for a whole request, and between two requests.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Final

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening.admission import Guard
from dsagent.agent.session.guard import reason_of
from dsagent.agent.sources.otlp_receiver.http_head import (
    MAX_HEAD_BYTES,
    Head,
    RefusedError,
    parse_head,
)
from dsagent.agent.sources.otlp_receiver.inbox import (
    MAX_BODY_BYTES,
    Inbox,
    TooLargeError,
    Verdict,
    gunzip,
)
from dsagent.agent.sources.otlp_receiver.wire import BadBodyError

MAX_CONNECTIONS = 32
MAX_HELD_BYTES = 16 << 20  # that have come of requests not complete, over all connections
REQUEST_DEADLINE_S = 10.0
IDLE_DEADLINE_S = 60.0
CHUNK_BYTES = 64 << 10

_PHRASES: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    411: "Length Required",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_STATUS: Final = {Verdict.BAD: 400, Verdict.TOO_LARGE: 413, Verdict.BUSY: 503}


class HttpServer:
    """Bound when made, so that a port in use is told at once; serves from `start` to `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        inbox: Inbox,
        guard: Guard,
        *,
        request_deadline_s: float = REQUEST_DEADLINE_S,
        idle_deadline_s: float = IDLE_DEADLINE_S,
    ) -> None:
        """Raises DsagentError where it may not, or cannot, listen there. Port 0: any that is
        free."""
        self.guard = guard
        family, address = guard.place(host, port, "--otlp-receive")
        self.request_deadline_s = request_deadline_s
        self.idle_deadline_s = idle_deadline_s
        self.inbox = inbox
        self.selector = selectors.DefaultSelector()
        self.connections: dict[socket.socket, _Connection] = {}
        self._thread: threading.Thread | None = None
        try:
            self._socket = socket.create_server((address, port), family=family, backlog=32)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DsagentError(
                f"cannot listen on {host}:{port} for OTLP over HTTP: {reason}; "
                "choose another address with --otlp-receive HOST:PORT"
            ) from error
        self._socket.setblocking(False)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self.cpu_ns = 0

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def held_bytes(self) -> int:
        return sum(each.held_bytes for each in tuple(self.connections.values()))

    def make_room(self) -> None:
        """What counts is what has come, not what was announced; whoever holds most gives way, so
        that a few who fill it cannot keep the others out."""
        if self.held_bytes > MAX_HELD_BYTES:
            coming = (each for each in self.connections.values() if not each.is_answered)
            max(coming, key=lambda each: each.held_bytes).refuse(503, "too much is coming at once")

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="otlp-http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """May be called twice, and before `start`."""
        if self._socket.fileno() < 0:
            return
        if self._thread is not None:
            with suppress(OSError):
                self._wake_writer.send(b"\0")
            self._thread.join()
        for connection in tuple(self.connections.values()):
            connection.close()
        self.selector.close()
        for each in (self._socket, self._wake_reader, self._wake_writer):
            each.close()

    def _serve(self) -> None:
        self.selector.register(self._socket, selectors.EVENT_READ, None)
        self.selector.register(self._wake_reader, selectors.EVENT_READ, None)
        while True:
            for key, _ in self.selector.select(1.0):
                if key.fileobj is self._wake_reader:
                    return
                if key.fileobj is self._socket:
                    self._accept()
                else:
                    key.data.ready()
            now_s = time.monotonic()
            for connection in tuple(self.connections.values()):
                connection.expire(now_s)
            self.cpu_ns = time.thread_time_ns()

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError:  # it hung up before we got to it, or there are no descriptors left
            time.sleep(0.01)
            return
        accepted.setblocking(False)
        if len(self.connections) >= MAX_CONNECTIONS:
            idle = next((each for each in self.connections.values() if each.is_idle), None)
            if idle is None:
                self.inbox.count("http", "hung up", f"more than {MAX_CONNECTIONS} connections")
                accepted.close()
                return
            idle.close()
        context = self.guard.context()
        if context is not None:
            try:  # the first read does the handshake
                accepted = context.wrap_socket(
                    accepted, server_side=True, do_handshake_on_connect=False
                )
            except OSError:  # it hung up at once
                accepted.close()
                return
        self.connections[accepted] = _Connection(accepted, self)


class _Connection:
    def __init__(self, accepted: socket.socket, server: HttpServer) -> None:
        self._socket = accepted
        self._server = server
        self._in = bytearray()
        self._out = b""
        self._head: Head | None = None
        self._ends_after_answer = False
        self._deadline_s = time.monotonic() + server.request_deadline_s
        server.selector.register(accepted, selectors.EVENT_READ, self)

    @property
    def is_idle(self) -> bool:
        """Between two requests."""
        return not self._in and not self._out and self._head is None

    @property
    def is_answered(self) -> bool:
        return bool(self._out)

    @property
    def held_bytes(self) -> int:
        return len(self._in)

    def ready(self) -> None:
        try:
            if self._out:
                self._write()
            else:
                self._read()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wants:
            # TLS goes on once it can: in a handshake it may have to write in order to read.
            wanted = (
                selectors.EVENT_WRITE
                if isinstance(wants, ssl.SSLWantWriteError)
                else selectors.EVENT_READ
            )
            self._server.selector.modify(self._socket, wanted, self)
        except OSError:
            self.close()
        except Exception as error:  # noqa: BLE001  one connection must not end all: it is counted
            self._server.inbox.count("http", "failed", reason_of(error))
            self.close()

    def expire(self, now_s: float) -> None:
        if now_s <= self._deadline_s:
            return
        if self.is_idle or self._out:
            self.close()
        else:
            self.refuse(408, "the request took too long to come")

    def _read(self) -> None:
        chunk = self._socket.recv(CHUNK_BYTES)  # more than a TLS record: none is left in the layer
        self._server.selector.modify(self._socket, selectors.EVENT_READ, self)
        if not chunk:
            self.close()
            return
        if self.is_idle:
            self._deadline_s = time.monotonic() + self._server.request_deadline_s
        self._in += chunk
        self._server.make_room()
        if self._in:
            self._go_on()

    def _go_on(self) -> None:
        """Answers the request that is complete, if one is; those behind it wait for that."""
        try:
            if self._head is None and not self._take_head():
                return
            head = self._head
            if head is None or len(self._in) < head.length:
                return
            body = bytes(memoryview(self._in)[: head.length])
            del self._in[: head.length]
            self._head = None
            self._answer(head, body)
        except RefusedError as refused:
            self.refuse(refused.status, str(refused))

    def _take_head(self) -> bool:
        raw, end, _ = self._in.partition(b"\r\n\r\n")
        if len(raw) > MAX_HEAD_BYTES:
            raise RefusedError(431, f"a head of more than {MAX_HEAD_BYTES} bytes")
        if not end:
            return False
        head = parse_head(bytes(raw), MAX_BODY_BYTES)
        if not self._server.guard.admits(head.authorization):
            raise RefusedError(401, "a bearer token is needed")
        del self._in[: len(raw) + 4]
        self._head = head
        if head.expects_100 and len(self._in) < head.length:
            self._socket.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _answer(self, head: Head, body: bytes) -> None:
        self._ends_after_answer = not head.keep_alive
        try:
            plain = gunzip(body) if head.gzip else body
        except TooLargeError as error:
            self._send(413, str(error))
            return
        except BadBodyError as error:
            self._send(400, str(error))
            return
        answer = self._server.inbox.put(plain)
        self._send(_STATUS.get(answer.verdict, 200), answer.why)

    def refuse(self, status: int, why: str) -> None:
        self._ends_after_answer = True
        self._in.clear()
        self._head = None
        with suppress(OSError):
            self._send(status, why)

    def _send(self, status: int, why: str) -> None:
        self._server.inbox.count("http", str(status), why)
        body = _status_message(why) if why else b""
        self._out = (
            f"HTTP/1.1 {status} {_PHRASES[status]}\r\n"
            "Content-Type: application/x-protobuf\r\n"
            f"Content-Length: {len(body)}\r\n"
            + ("Retry-After: 1\r\n" if status == 503 else "")
            + ("Allow: POST\r\n" if status == 405 else "")
            + ("WWW-Authenticate: Bearer\r\n" if status == 401 else "")
            + f"Connection: {'close' if self._ends_after_answer else 'keep-alive'}\r\n\r\n"
        ).encode() + body
        self._deadline_s = time.monotonic() + self._server.request_deadline_s
        self._server.selector.modify(self._socket, selectors.EVENT_WRITE, self)

    def _write(self) -> None:
        sent = self._socket.send(self._out)
        self._out = self._out[sent:]
        if self._out:
            return
        if self._ends_after_answer:
            self._end()
            return
        self._deadline_s = time.monotonic() + self._server.idle_deadline_s
        self._server.selector.modify(self._socket, selectors.EVENT_READ, self)
        if self._in:
            self._deadline_s = time.monotonic() + self._server.request_deadline_s
            self._go_on()

    def _end(self) -> None:
        """What is still coming would make the kernel reset the connection, and the answer with
        it: some of it is read away first."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            for _ in range(16):
                if not self._socket.recv(CHUNK_BYTES):
                    break
        self.close()

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            del self._server.connections[self._socket]
            self._server.selector.unregister(self._socket)
            self._socket.close()


def _status_message(text: str) -> bytes:
    """google.rpc.Status with that message (its field 2)."""
    raw = text.encode()[:100]
    return bytes((0x12, len(raw))) + raw
