"""Takes what an agent sends, as a Collector and Pyroscope would, and only weighs it: what went over
the wire, what it unpacks to, and how many spans, requests, points, records and profiles that is."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_BODY_BYTES = 64 << 20


@dataclass(slots=True)
class Weight:
    """Of one signal."""

    bodies: int = 0
    wire_bytes: int = 0
    raw_bytes: int = 0
    items: int = 0  # spans, points, log records, profiles
    requests: int = 0  # spans that are a request's own


@dataclass(slots=True)
class Weighed:
    port: int = 0
    signals: dict[str, Weight] = field(
        default_factory=lambda: {name: Weight() for name in ("traces", "metrics", "logs", "Push")}
    )
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def weighing_collector() -> Iterator[Weighed]:
    """Listens on a free port of loopback, for OTLP over HTTP and Pyroscope's pushes."""
    weighed = Weighed()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 <= length <= MAX_BODY_BYTES:
                self.send_error(413)
                return
            body = self.rfile.read(length)
            is_packed = self.headers.get("Content-Encoding") == "gzip"
            raw = gzip.decompress(body) if is_packed else body
            with weighed.lock:
                _weigh(weighed.signals[self.path.rpartition("/")[2]], len(body), raw, self.path)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    weighed.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, name="weighing", daemon=True)
    thread.start()
    try:
        yield weighed
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _weigh(weight: Weight, wire_bytes: int, raw: bytes, path: str) -> None:
    weight.bodies += 1
    weight.wire_bytes += wire_bytes
    weight.raw_bytes += len(raw)
    match path.rpartition("/")[2]:
        case "traces":
            items, requests = _spans(raw)
            weight.requests += requests
        case "metrics":
            items = _points(raw)
        case "logs":
            items = _records(raw)
        case _:
            items = 1
    weight.items += items


def _spans(raw: bytes) -> tuple[int, int]:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

    spans = [
        span
        for of_resource in TracesData.FromString(raw).resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]
    return len(spans), sum(span.kind == Span.SPAN_KIND_SERVER for span in spans)


def _points(raw: bytes) -> int:
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

    return sum(
        len(getattr(metric, metric.WhichOneof("data")).data_points)
        for of_resource in MetricsData.FromString(raw).resource_metrics
        for of_scope in of_resource.scope_metrics
        for metric in of_scope.metrics
        if metric.WhichOneof("data")
    )


def _records(raw: bytes) -> int:
    from opentelemetry.proto.logs.v1.logs_pb2 import LogsData

    return sum(
        len(of_scope.log_records)
        for of_resource in LogsData.FromString(raw).resource_logs
        for of_scope in of_resource.scope_logs
    )
