"""Real gRPC servers of OTLP, with and without TLS, and certificates for them."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from made import until
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Behave = Callable[[int, grpc.ServicerContext], None]


def takes_all(_times: int, _context: grpc.ServicerContext) -> None:
    """Every call succeeds."""


@dataclass(frozen=True)
class Signal:
    """One service of OTLP: how it is added to a server, and where its items lie in a request."""

    add: Callable[[Any, grpc.Server], None]
    answer: Callable[[], Any]
    resources: str
    scopes: str
    items: str
    kept: str  # where Received keeps them

    def of(self, request: Any) -> Iterator[Any]:
        for of_resource in getattr(request, self.resources):
            for of_scope in getattr(of_resource, self.scopes):
                yield from getattr(of_scope, self.items)


SIGNALS = (
    Signal(
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server,
        trace_service_pb2.ExportTraceServiceResponse,
        *("resource_spans", "scope_spans", "spans", "spans"),
    ),
    Signal(
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server,
        metrics_service_pb2.ExportMetricsServiceResponse,
        *("resource_metrics", "scope_metrics", "metrics", "metrics"),
    ),
    Signal(
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server,
        logs_service_pb2.ExportLogsServiceResponse,
        *("resource_logs", "scope_logs", "log_records", "logs"),
    ),
)


@dataclass
class Received:
    """What a server was sent, and how."""

    port: int = 0
    calls: int = 0
    spans: list[Span] = field(default_factory=list)
    metrics: list[Metric] = field(default_factory=list)
    logs: list[LogRecord] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def grpc_back_end(
    behave: Behave = takes_all, credentials: grpc.ServerCredentials | None = None, port: int = 0
) -> Iterator[Received]:
    """`behave` is called with the number of the call, before it is answered; it may abort it."""
    received = Received()

    def come(context: grpc.ServicerContext) -> None:
        received.calls += 1
        received.headers.append({str(k): str(v) for k, v in context.invocation_metadata()})
        behave(received.calls, context)

    def exports(signal: Signal) -> Any:
        def export(request: Any, context: grpc.ServicerContext) -> Any:
            come(context)
            getattr(received, signal.kept).extend(signal.of(request))
            return signal.answer()

        return SimpleNamespace(Export=export)

    server = grpc.server(ThreadPoolExecutor(4))
    for signal in SIGNALS:
        signal.add(exports(signal), server)
    address = f"127.0.0.1:{port}"
    if credentials is None:
        received.port = server.add_insecure_port(address)
    else:
        received.port = server.add_secure_port(address, credentials)
    server.start()
    try:
        yield received
    finally:
        server.stop(0).wait(10)


@contextmanager
def rotel(to_port: int) -> Iterator[int]:
    """A real collector that passes everything on to a gRPC server at `to_port`; yields its port
    for HTTP."""
    ports = [free_port(), free_port()]
    program = Path(str(files("rotel"))) / "rotel-agent"
    command = [
        *(str(program), "start", "--exporter", "otlp", "--batch-timeout", "100ms"),
        *("--otlp-http-endpoint", f"127.0.0.1:{ports[0]}"),
        *("--otlp-grpc-endpoint", f"127.0.0.1:{ports[1]}"),
        *("--otlp-exporter-endpoint", f"http://127.0.0.1:{to_port}"),
        *("--otlp-exporter-protocol", "grpc"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: process.poll() is not None or is_listening(ports[0]))
        assert process.poll() is None, "rotel did not start"
        yield ports[0]
    finally:
        process.terminate()
        process.wait(20)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority of our own, and what it signed for a server and for a client."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """By openssl's own program; the server's is for 127.0.0.1 and localhost."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout")
    openssl("req", "-x509", *key, "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA", "-days", "2")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    for who in ("server", "client"):
        openssl("req", *key, f"{who}.key", "-out", f"{who}.csr", "-subj", f"/CN={who}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        named = ("-extfile", "names") if who == "server" else ()
        openssl("x509", "-req", "-in", f"{who}.csr", *signed, *named, "-out", f"{who}.pem")
    return Certificates(
        folder / "ca.pem",
        folder / "server.pem",
        folder / "server.key",
        folder / "client.pem",
        folder / "client.key",
    )
