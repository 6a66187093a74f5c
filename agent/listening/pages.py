"""A small HTTP server for pages that people and Prometheus ask for: GET, one request a connection.

A thread a connection, MAX_CONNECTIONS at most. Where all places are taken, a new one takes that of
the one which has been there longest, of those that ask for nothing if there are any: idle
connections keep nobody out. Whatever a client does, it has CONNECTION_DEADLINE_S seconds and
MAX_HEAD_BYTES.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.host.procfs import escape
from dsagent.agent.listening.admission import Guard

MAX_CONNECTIONS = 8
CLIENT_TIMEOUT_S = 5.0  # for each piece it sends or takes
CONNECTION_DEADLINE_S = 15.0  # for all of them: a byte every few seconds is no request
MAX_HEAD_BYTES = 16 << 10
TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    status: int
    content_type: str
    text: str


@dataclass(frozen=True, slots=True)
class Tally:
    """Of all requests so far."""

    answered: int = 0  # with 200
    failed: int = 0  # that broke off
    refused: int = 0  # too many at once, too slow, or without the right token
    reason: str = ""  # of the last that failed or was refused


class PageServer(ThreadingHTTPServer):
    """Bound when made; `start` to `stop`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, host: str, port: int, flag: str, guard: Guard, answer: Callable[[str, str], Page]
    ) -> None:
        """`flag`: what asked for it. `answer` gets the path, without its query, and the header
        Accept, in the connection's thread. Raises DsagentError where it may not, or cannot, listen
        there. Port 0: any that is free."""
        self.guard = guard
        self.answer = answer
        self._tally = Tally()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Open] = {}  # the oldest first
        self._thread: threading.Thread | None = None
        self.address_family, address = guard.place(host, port, flag)
        try:
            super().__init__((address, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DsagentError(
                f"cannot listen on {host}:{port} for Prometheus: {reason}; "
                f"choose another address with {flag} HOST:PORT"
            ) from error

    @property
    def port(self) -> int:
        """Where it listens: the port chosen, if 0 was asked for."""
        return int(self.server_address[1])

    @property
    def tally(self) -> Tally:
        with self._lock:
            return self._tally

    def start(self, name: str) -> None:
        """`name`: of its thread."""
        self._thread = threading.Thread(target=self.serve_forever, name=name, daemon=True)
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        if self._thread is not None:
            self.shutdown()
            self._thread.join(deadline_s)
        self.server_close()
        with self._lock:
            for connection in self._open:
                _hang_up(connection)

    def server_bind(self) -> None:
        # HTTPServer's own would ask the name service for this host's name, which may hang.
        TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            accepted, client_address = super().get_request()
        except OSError:  # it hung up before we got to it, or there are no descriptors left:
            time.sleep(0.05)  # then it is still there, and asking at once would spin
            raise
        context = self.guard.context()
        if context is None:
            return accepted, client_address
        try:  # The handshake waits for the connection's own thread.
            return (
                context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False),
                client_address,
            )
        except OSError:
            accepted.close()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                self._make_room()
            self._open[request] = _Open(time.monotonic() + CONNECTION_DEADLINE_S)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads to be had
            self._leave(request)
            raise

    def _make_room(self) -> None:
        idle = (each for each, state in self._open.items() if not state.asks)
        oldest = next(idle, None) or next(iter(self._open))
        self._refuse(oldest, f"more than {MAX_CONNECTIONS} connections at once")

    def service_actions(self) -> None:
        """About twice a second."""
        now_s = time.monotonic()
        with self._lock:
            for each, state in tuple(self._open.items()):
                if now_s > state.deadline_s:
                    self._refuse(
                        each, f"a connection took longer than {CONNECTION_DEADLINE_S:.0f} s"
                    )

    def _refuse(self, connection: socket.socket, why: str) -> None:
        """With the lock held."""
        del self._open[connection]
        self._tally = replace(self._tally, refused=self._tally.refused + 1, reason=why)
        _hang_up(connection)

    def asks(self, request: socket.socket) -> None:
        """A whole request has come."""
        with self._lock:
            if request in self._open:
                self._open[request].asks = True

    def count_answered(self) -> None:
        with self._lock:
            self._tally = replace(self._tally, answered=self._tally.answered + 1)

    def count_unadmitted(self) -> None:
        with self._lock:
            self._tally = replace(
                self._tally, refused=self._tally.refused + 1, reason="a client without the token"
            )

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def shutdown_request(self, request: Any) -> None:
        with suppress(OSError, ValueError):  # it may have been hung up on
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The base would print a traceback.
        error = sys.exc_info()[1]
        reason = escape(f"{type(error).__name__}: {error}")
        with self._lock:
            self._tally = replace(self._tally, failed=self._tally.failed + 1, reason=reason)


@dataclass(slots=True)
class _Open:
    deadline_s: float
    asks: bool = False


def _hang_up(connection: socket.socket) -> None:
    """Its thread sees its end, and closes it. Of TLS too it is the TCP connection that ends: a
    farewell would wait for the other side."""
    with suppress(OSError):  # it has just gone by itself
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _BoundedHead(io.RawIOBase):
    """The first MAX_HEAD_BYTES of what a client sends; the base would take 6 MB of headers."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream = stream
        self._left = MAX_HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        line = self._stream.readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("head")
        return line


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = CLIENT_TIMEOUT_S
    server_version = "dsagent"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = _BoundedHead(self.rfile)  # type: ignore[assignment]
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.do_handshake()

    def do_GET(self) -> None:
        self.server.asks(self.connection)
        if not self.server.guard.admits(self.headers.get("Authorization")):
            self.server.count_unadmitted()
            self._answer(Page(401, TEXT, "a bearer token is needed\n"))
            return
        page = self.server.answer(self.path.split("?")[0], self.headers.get("Accept", ""))
        self._answer(page)
        if page.status == 200:
            self.server.count_answered()

    def _answer(self, page: Page) -> None:
        body = page.text.encode()
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if page.status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Requests are counted, not logged."""
