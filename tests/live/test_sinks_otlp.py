"""OTLP to an independent receiver, and to back ends that hang, refuse, lie or talk nonsense."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from made import S, account, batch, record, step, until
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from dsagent.agent.sinks.held_steps import HOLD_NS
from dsagent.agent.sinks.otlp import OtlpSink
from dsagent.agent.sinks.otlp_config import otlp_config
from dsagent.agent.sinks.otlp_delivery import UNREACHED_S
from dsagent.agent.sinks.otlp_http import HttpChannel
from dsagent.agent.sinks.otlp_post import LAST_WAIT_S
from dsagent.agent.sinks.outbox import MAX_BYTES, MAX_ITEMS
from dsagent.agent.slo import Limits
from dsagent.instrumentation.spans import step_span_id, step_trace_id

ENDED_NS = record().sent_ns
STEPS = (step(1, ("kept", "dropped")), step(2, ("dropped",)), step(3, ("kept",)))
FULL = batch(
    now_ns=ENDED_NS,
    steps=STEPS,
    accounts=(
        account("kept", sampled=True, parent_span_id=77, step_ids=(1, 3)),
        account("dropped", sampled=False, step_ids=(1, 2)),
    ),
)
LATER = batch(now_ns=ENDED_NS + HOLD_NS)


LONG_MS = "600000"  # a try does not end by itself: what ends, somebody else has ended


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def sink_to(port: int, **environ: str) -> OtlpSink:
    config = otlp_config(environ, f"http://127.0.0.1:{port}")
    assert config is not None
    return OtlpSink(config, Limits(), resource={"service.name": "tried"})


def test_an_independent_receiver_gets_the_trace_and_the_linked_steps() -> None:
    async def receive() -> tuple[Span, Span, Span, Metric]:
        port = free_port()
        async with OtelTapHttpProtobufReceiver(OtelTapHttpProtobufReceiverSettings(port)) as tap:
            sink = sink_to(port, OTEL_METRIC_EXPORT_INTERVAL="100")
            sink.start()
            trace_id = record("kept").trace_id.to_bytes(16, "big")
            waits = asyncio.gather(
                tap.await_trace(lambda s: s.trace_id == trace_id and s.kind == 2, 20),
                tap.await_trace(lambda s: s.trace_id == trace_id and s.name == "decode step", 20),
                tap.await_trace(lambda s: s.name == "engine step", 20),
                tap.await_metric(lambda m: m.name == "gen_ai.server.time_to_first_token", 20),
            )
            sink.take(FULL)
            sink.take(LATER)
            found = await waits
            await asyncio.to_thread(sink.stop, 10.0)
            status = sink.status()
            assert status.sent == status.acknowledged > 0
            assert status.failed == status.dropped == 0
            return found[0], found[1], found[2], found[3]

    root, child, of_step, ttft = asyncio.run(receive())
    attributes = {a.key: a.value for a in root.attributes}
    assert root.name == "chat tiny-llama"
    assert root.parent_span_id == (77).to_bytes(8, "big")
    assert attributes["dsagent.sampling.reason"].string_value == "parent"
    parts = {k: v.int_value for k, v in attributes.items() if k.startswith("dsagent.part.")}
    assert parts["dsagent.part.cpu.runqueue_ns"] == S // 2
    # To the nanosecond, on the wall clock, too.
    assert sum(parts.values()) == root.end_time_unix_nano - root.start_time_unix_nano == S
    assert child.links[0].trace_id == step_trace_id(5, 1).to_bytes(16, "big")
    assert of_step.span_id == step_span_id(5, 1).to_bytes(8, "big")
    # Only to the request that is kept.
    assert [(link.trace_id, link.span_id) for link in of_step.links] == [
        (root.trace_id, root.span_id)
    ]
    (point,) = ttft.histogram.data_points
    assert point.count == 2
    assert [e.trace_id for e in point.exemplars] == [root.trace_id]


class BackEnd(BaseHTTPRequestHandler):
    """Answers what the test wants, and remembers what it was sent."""

    protocol_version = "HTTP/1.1"
    server: Answering

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        self.server.received.append((self.path, body, dict(self.headers)))
        status, answer, headers = self.server.answer(len(self.server.received))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


Answer = tuple[int, bytes, dict[str, str]]


class Answering(ThreadingHTTPServer):
    def __init__(self, answer: Callable[[int], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), BackEnd)
        self.answer = answer
        self.received: list[tuple[str, bytes, dict[str, str]]] = []


@contextmanager
def back_end(answer: Callable[[int], Answer]) -> Iterator[Answering]:
    server = Answering(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def traces_only(port: int, **environ: str) -> OtlpSink:
    return sink_to(port, OTEL_METRICS_EXPORTER="none", OTEL_LOGS_EXPORTER="none", **environ)


def test_the_resource_the_headers_and_the_metrics() -> None:
    with back_end(lambda _: (200, b"", {})) as server:
        sink = sink_to(server.server_port, OTEL_EXPORTER_OTLP_HEADERS="Authorization=Bearer%20x")
        sink.start()
        sink.take(FULL)
        sink.stop(10.0)
    by_path = {path: (body, headers) for path, body, headers in server.received}
    body, headers = by_path["/v1/traces"]
    assert headers["Authorization"] == "Bearer x"
    assert headers["Content-Type"] == "application/x-protobuf"
    (resource_spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    attributes = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
    assert attributes["service.name"] == "tried"
    assert attributes["service.instance.id"]
    names = [span.name for span in resource_spans.scope_spans[0].spans]
    # Flushed at the end: the two steps that serve the kept request, none that does not.
    assert names.count("engine step") == 2
    (of_metrics,) = ExportMetricsServiceRequest.FromString(
        by_path["/v1/metrics"][0]
    ).resource_metrics
    assert of_metrics.resource == resource_spans.resource
    causes = {m.name: m for m in of_metrics.scope_metrics[0].metrics}["dsagent.request.cause"]
    assert causes.sum.is_monotonic
    assert sum(p.as_double for p in causes.sum.data_points) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, b"no such page", {}), "answered 404"),
        ((400, b"bad", {}), "answered 400"),
        ((200, b"<html>login please</html>", {}), "not OTLP"),
        ((307, b"", {"Location": "http://127.0.0.1:1/"}), "answered 307"),
    ],
)
def test_what_is_not_taken_is_failed(answer: Answer, reason: str) -> None:
    with back_end(lambda _: answer) as server:
        sink = traces_only(server.server_port)
        sink.start()
        sink.take(FULL)
        sink.stop(10.0)
    status = sink.status()
    assert status.sent == status.failed > 0
    assert status.acknowledged == 0
    assert reason in status.reason
    # Not tried again, but for the one without gzip where that might be the reason.
    assert len(server.received) == (2 if answer[0] == 400 else 1)
    assert server.received[0][2]["Content-Encoding"] == "gzip"


def test_busy_back_ends_are_tried_again() -> None:
    def busy_once(times: int) -> Answer:
        return (503, b"", {"Retry-After": "0"}) if times == 1 else (200, b"", {})

    with back_end(busy_once) as server:
        sink = traces_only(server.server_port)
        sink.start()
        sink.take(FULL)
        sink.stop(10.0)
    assert sink.status().sent == sink.status().acknowledged > 0
    assert [body for _, body, _ in server.received] == [server.received[0][1]] * 2


def test_partial_success_is_counted() -> None:
    partial = ExportTracePartialSuccess(rejected_spans=2, error_message="two are too old")
    answer = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
    with back_end(lambda _: (200, answer, {})) as server:
        sink = traces_only(server.server_port)
        sink.start()
        sink.take(FULL)
        sink.stop(10.0)
    status = sink.status()
    assert (status.failed, status.acknowledged) == (2, status.sent - 2)
    assert status.reason == "two are too old"


def test_nobody_listens() -> None:
    sink = traces_only(free_port())
    sink.start()
    sink.take(FULL)
    sink.stop(1.0)
    status = sink.status()
    assert status.sent == status.failed > 0
    assert "refused" in status.reason


def test_one_that_takes_no_connection_is_waited_for_a_moment_only() -> None:
    """Its queue of connections is full: a new one gets no answer at all."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fill = [socket.socket() for _ in range(4)]
        for each in fill:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        sink = traces_only(port, OTEL_EXPORTER_OTLP_TIMEOUT=LONG_MS)
        sink.start()
        sink.take(FULL)
        sink.stop(3600.0)
        for each in fill:
            each.close()
    assert sink.status().sent == sink.status().failed > 0
    assert sink.status().reason == "no answer by the end"  # broken off, before it ended by itself


def test_one_that_refuses_is_waited_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []
    send = HttpChannel.send

    def counted(channel: HttpChannel, body: bytes, *, gzipped: bool) -> object:
        tries.append(send(channel, body, gzipped=gzipped))
        return tries[-1]

    monkeypatch.setattr(HttpChannel, "send", counted)
    sink = traces_only(free_port())
    sink.start()
    sink.take(FULL)
    sink.stop(3600.0)
    assert "refused" in sink.status().reason
    # As many as fit into the moment, however slow the machine: each is followed by a pause.
    assert 0 < len(tries) <= 2 + UNREACHED_S / (0.8 * LAST_WAIT_S)


@contextmanager
def raw_server(says: bytes | None) -> Iterator[int]:
    """Accepts; says something that is not HTTP and closes, or nothing at all."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            if says is not None:
                connection.sendall(says)
                connection.recv(1 << 20)
                connection.close()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for connection in held:
        connection.close()
    thread.join(10)


def test_garbage_instead_of_http() -> None:
    with raw_server(b"\x00\x00\x12\x04garbage that is no HTTP\r\n\r\n") as port:
        sink = traces_only(port)
        sink.start()
        sink.take(FULL)
        until(lambda: sink.status().failed > 0)
        sink.stop(10.0)
    assert "no HTTP answer" in sink.status().reason


def test_a_back_end_that_hangs_costs_bounded_memory_and_counted_drops() -> None:
    with raw_server(None) as port:
        sink = traces_only(port, OTEL_EXPORTER_OTLP_TIMEOUT=LONG_MS)
        sink.start()
        made = 0
        while sink.status().dropped == 0:
            assert made < 20_000
            many = range(made, made + 500)
            made += len(many)
            sink.take(batch(accounts=tuple(account(f"r{i}", sampled=True) for i in many)))
        items, size_bytes = sink._spans.waiting
        assert items <= MAX_ITEMS
        assert size_bytes <= MAX_BYTES
        sink.stop(0.5)
        status = sink.status()
        assert status.lost["no_answer"] > 0  # broken off, before it ended by itself
        assert status.acknowledged == 0
        assert status.sent == status.failed > 0
        assert status.made is not None
        assert status.sent + status.dropped == status.made >= made
        assert status.queued == 0
        assert status.lost["queue_full"] > 0


def test_numbers_that_otlp_cannot_hold_are_dropped_and_counted() -> None:
    with back_end(lambda _: (200, b"", {})) as server:
        sink = traces_only(server.server_port)
        sink.start()
        sink.take(batch(steps=(step(2**64 - 1, ("kept",)),)))
        sink.take(FULL)
        sink.stop(10.0)
    status = sink.status()
    assert status.dropped == 1
    assert "cannot hold" in status.reason
    assert status.sent == status.acknowledged > 0
