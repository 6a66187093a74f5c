"""What the sidecar sends to: a receiver of OTLP that goes and comes again, and a web hook that is
called and hangs."""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

HANG_S = 30.0


class Server(ThreadingHTTPServer):
    """On loopback; at a port of before, where one is given."""

    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, *_: Any) -> None:
        """A client that goes in the middle is no trouble."""


class OtlpReceiver:
    """Takes traces, metrics and logs over HTTP, and counts what it took; it keeps no items. What is
    on its way when it goes is answered for or not, as it happens."""

    def __init__(self) -> None:
        self.items: Counter[str] = Counter()
        self.trace_ids: set[str] = set()
        self.outages = 0
        self._lock = threading.Lock()
        self._server = self._serve(0)
        self.port: int = self._server.server_port

    def _serve(self, port: int) -> Server:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Not on the terminal."""

        server = Server(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def take(self, path: str, body: bytes) -> None:
        with self._lock:
            if path.endswith("/traces"):
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        self.items["traces"] += len(scope.spans)
                        self.trace_ids.update(span.trace_id.hex() for span in scope.spans)
            elif path.endswith("/metrics"):
                metrics = ExportMetricsServiceRequest.FromString(body)
                self.items["metrics"] += sum(
                    len(scope.metrics)
                    for resource in metrics.resource_metrics
                    for scope in resource.scope_metrics
                )
            elif path.endswith("/logs"):
                logs = ExportLogsServiceRequest.FromString(body)
                self.items["logs"] += sum(
                    len(scope.log_records)
                    for resource in logs.resource_logs
                    for scope in resource.scope_logs
                )

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Nobody listens meanwhile."""
        self.close()
        self.outages += 1
        try:
            yield
        finally:
            self._server = self._serve(self.port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class HangingHook:
    """Takes each alert, and answers long after whoever sent it has given up."""

    def __init__(self) -> None:
        self.calls = 0
        self._over = threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.calls += 1
                self.rfile.read(int(self.headers["Content-Length"]))
                hook._over.wait(HANG_S)

            def log_message(self, *_: object) -> None:
                """Not on the terminal."""

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/alerts"

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
