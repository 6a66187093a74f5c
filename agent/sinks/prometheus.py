"""Answers Prometheus' scrapes on GET /metrics."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from dsagent.agent.aggregate import Aggregate
from dsagent.agent.errors import DsagentError
from dsagent.agent.sampling import Sampler
from dsagent.agent.series import Family
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.openmetrics import CLASSIC_TYPE, OPENMETRICS_TYPE, render
from dsagent.agent.slo import Limits
from dsagent.agent.slo_metrics import SloFigures

MAX_CONNECTIONS = 8
CLIENT_TIMEOUT_S = 5.0


class PrometheusSink:
    """A sink that is pulled: what it counts as sent are answered scrapes."""

    name = "prometheus"

    def __init__(
        self,
        host: str,
        port: int,
        limits: Limits,
        *,
        sampler: Sampler | None = None,
        resource: Mapping[str, str] | None = None,
        slo: SloFigures | None = None,
    ) -> None:
        """`sampler`: the one that decides for all sinks; `resource`: resource_overrides();
        `slo`: what an evaluator, which is a sink before this one, finds."""
        self._host = host
        self._port = port
        self._aggregate = Aggregate(limits, sampler or Sampler(), resource or {}, slo)
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._sent = 0
        self._failed = 0
        self._dropped = 0
        self._reason = ""

    @property
    def port(self) -> int:
        """Where it listens: the port chosen, if 0 was asked for."""
        return self._port

    def start(self) -> None:
        try:
            self._server = _Server(self._host, self._port, self)
        except OSError as error:
            reason = error.strerror or str(error)
            raise DsagentError(
                f"cannot listen on {self._host}:{self._port} for Prometheus: {reason}; "
                "choose another address with --prometheus HOST:PORT"
            ) from error
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="sink-prometheus", daemon=True
        )
        self._thread.start()

    def take(self, batch: Explained) -> None:
        with self._lock:
            self._aggregate.add(batch)

    def status(self) -> SinkStatus:
        with self._lock:
            return SinkStatus(
                self.name, self._sent, self._sent, self._failed, self._dropped, self._reason
            )

    def stop(self, deadline_s: float) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        if self._thread is not None:
            self._thread.join(deadline_s)

    def collect(self) -> list[Family]:
        """What a scrape would show now."""
        with self._lock:
            return self._aggregate.collect()

    def count_answered(self) -> None:
        with self._lock:
            self._sent += 1

    def count_failed(self, error: BaseException | None) -> None:
        """A scrape broke off."""
        with self._lock:
            self._failed += 1
            self._reason = f"{type(error).__name__}: {error}"

    def count_refused(self) -> None:
        """A connection was closed to make room: too many were open."""
        with self._lock:
            self._dropped += 1
            self._reason = f"more than {MAX_CONNECTIONS} connections at once"


class _Server(ThreadingHTTPServer):
    """A thread a connection, MAX_CONNECTIONS at most. Where all places are taken, a new one takes
    that of the one which has been there longest, of those that ask for nothing if there are any:
    idle connections keep nobody out."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, sink: PrometheusSink) -> None:
        self.sink = sink
        self._lock = threading.Lock()
        self._asking: dict[socket.socket, bool] = {}  # those open, the oldest first
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = info[0]
        super().__init__((str(info[4][0]), int(info[4][1])), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own would ask the name service for this host's name, which may hang.
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._asking) >= MAX_CONNECTIONS:
                self._hang_up()
            self._asking[request] = False
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads to be had
            self._leave(request)
            raise

    def _hang_up(self) -> None:
        idle = (each for each, asks in self._asking.items() if not asks)
        oldest = next(idle, None) or next(iter(self._asking))
        del self._asking[oldest]
        self.sink.count_refused()
        with suppress(OSError):  # it has just gone by itself
            oldest.shutdown(socket.SHUT_RDWR)  # its thread sees its end, and closes it

    def asks(self, request: socket.socket) -> None:
        """A whole request has come."""
        with self._lock:
            if request in self._asking:
                self._asking[request] = True

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._asking.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The base would print a traceback.
        self.sink.count_failed(sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_TIMEOUT_S
    server_version = "dsagent"
    sys_version = ""

    def do_GET(self) -> None:
        self.server.asks(self.connection)
        if self.path.split("?")[0] != "/metrics":
            self._answer(404, CLASSIC_TYPE, "look at /metrics\n")
            return
        openmetrics = "application/openmetrics-text" in self.headers.get("Accept", "")
        body = render(self.server.sink.collect(), openmetrics=openmetrics)
        self._answer(200, OPENMETRICS_TYPE if openmetrics else CLASSIC_TYPE, body)
        self.server.sink.count_answered()

    def _answer(self, status: int, content_type: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Scrapes are counted, not logged."""
