"""OTLP over gRPC and TLS, what is tried again, a queue that survives, and a real collector."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from made import account, batch, record, step, until
from otlp_back_ends import Certificates, free_port, grpc_back_end, make_certificates, rotel

from dsagent.agent.errors import DsagentError
from dsagent.agent.facts import Event
from dsagent.agent.sinks.base import SinkStatus
from dsagent.agent.sinks.otlp import MAX_ALERTS, OtlpSink
from dsagent.agent.sinks.otlp_config import otlp_config
from dsagent.agent.sinks.otlp_delivery import QueueOptions
from dsagent.agent.slo import Limits
from dsagent.agent.slo.alert import Alert

FULL = batch(
    now_ns=record().sent_ns,
    steps=(step(1, ("kept",)),),
    accounts=(account("kept", sampled=True, step_ids=(1,), error="bad luck of ada@example.org"),),
    events=(Event("source.failed", record().sent_ns, "source proc failed: peer 203.0.113.9"),),
)
ONE_BODY = batch(accounts=(account("kept", sampled=True, step_ids=()),))
NO_METRICS = {"OTEL_METRICS_EXPORTER": "none"}
TRACES_ONLY = {**NO_METRICS, "OTEL_LOGS_EXPORTER": "none"}


def sink_to(endpoint: str, environ: dict[str, str], queue: QueueOptions | None = None) -> OtlpSink:
    config = otlp_config(environ, endpoint)
    assert config is not None
    return OtlpSink(config, Limits(), queue=queue)


def adds_up(status: SinkStatus) -> bool:
    parts = [adds_up(part) for part in status.parts]
    assert status.made is not None
    total = status.queued + status.sent + status.dropped
    return (
        all(parts)
        and status.made + status.recovered == total
        and status.sent == status.acknowledged + status.failed
        and sum(status.lost.values()) == status.failed + status.dropped
    )


def test_all_three_signals_over_grpc() -> None:
    with grpc_back_end() as received:
        environ = {
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_HEADERS": "X-Tenant=one",
        }
        sink = sink_to(f"http://127.0.0.1:{received.port}", environ)
        sink.start()
        sink.take(FULL)
        sink.stop(20.0)
    status = sink.status()
    assert adds_up(status)
    assert status.acknowledged == status.made
    assert [part.name for part in status.parts] == ["traces", "metrics", "logs"]
    assert all(part.acknowledged for part in status.parts)
    assert all(headers["x-tenant"] == "one" for headers in received.headers)
    root = next(span for span in received.spans if span.kind == span.SPAN_KIND_SERVER)
    assert root.status.message == "bad luck of [email]"
    assert {"dsagent.requests", "dsagent.request.cause"} <= {m.name for m in received.metrics}
    by_event = {log.event_name: log for log in received.logs}
    failed = by_event["dsagent.request.failed"]
    assert failed.trace_id == root.trace_id
    assert failed.span_id == root.span_id
    assert failed.severity_text == "ERROR"
    assert "[email]" in failed.body.string_value
    assert by_event["dsagent.source.failed"].body.string_value.endswith("peer [ip]")
    # Only what is worth it is compressed.
    assert {headers.get("grpc-encoding", "identity") for headers in received.headers} <= {
        "gzip",
        "identity",
    }


def test_an_alert_told_at_the_very_end_goes_out_too() -> None:
    with grpc_back_end() as received:
        environ = {**NO_METRICS, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
        sink = sink_to(f"http://127.0.0.1:{received.port}", environ)
        sink.start()
        sink.take(batch())
        alert = Alert("DsagentBlind", "firing", "blind", {}, "nothing is seen any more", 1, 2)
        for _ in range(MAX_ALERTS + 5):
            sink.tell(alert)
        sink.stop(20.0)
    status = sink.status()
    assert adds_up(status)
    assert status.lost == {"queue_full": 5}
    assert len(received.logs) == MAX_ALERTS
    assert received.logs[0].event_name == "dsagent.alert.firing"


def test_exponential_histograms_where_they_are_asked_for() -> None:
    with grpc_back_end() as received:
        environ = {
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": (
                "base2_exponential_bucket_histogram"
            ),
        }
        sink = sink_to(f"http://127.0.0.1:{received.port}", environ)
        sink.start()
        sink.take(FULL)
        sink.stop(20.0)
    assert adds_up(sink.status())
    assert sink.status().acknowledged == sink.status().made
    assert not [metric.name for metric in received.metrics if metric.HasField("histogram")]
    ttft = next(m for m in received.metrics if m.name == "gen_ai.server.time_to_first_token")
    (point,) = ttft.exponential_histogram.data_points
    assert (point.count, point.sum, point.min, point.max) == (1, 0.3, 0.3, 0.3)
    assert list(point.positive.bucket_counts) == [1]
    base = 2 ** (2.0**-point.scale)
    assert base**point.positive.offset < 0.3 <= base ** (point.positive.offset + 1)
    assert [e.trace_id for e in point.exemplars] == [record("kept").trace_id.to_bytes(16, "big")]


def retry_info(seconds: float) -> tuple[tuple[str, bytes], ...]:
    info = RetryInfo()
    info.retry_delay.FromNanoseconds(round(seconds * 1e9))
    detail = AnyMessage()
    detail.Pack(info)
    return (("grpc-status-details-bin", Status(code=8, details=[detail]).SerializeToString()),)


@pytest.mark.parametrize(
    ("code", "told", "is_tried_again"),
    [
        (grpc.StatusCode.UNAVAILABLE, None, True),
        (grpc.StatusCode.ABORTED, 0.01, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 0.01, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, None, False),
        (grpc.StatusCode.INVALID_ARGUMENT, None, False),
        (grpc.StatusCode.UNAUTHENTICATED, 0.01, False),
    ],
)
def test_what_grpc_tries_again(
    code: grpc.StatusCode, told: float | None, is_tried_again: bool
) -> None:
    def fails_once(times: int, context: grpc.ServicerContext) -> None:
        if times == 1:
            if told is not None:
                context.set_trailing_metadata(retry_info(told))
            context.abort(code, "not now")

    with grpc_back_end(fails_once) as received:
        sink = sink_to(
            f"http://127.0.0.1:{received.port}",
            {**TRACES_ONLY, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        )
        sink.start()
        sink.take(ONE_BODY)
        until(lambda: sink.status().sent > 0)
        sink.stop(20.0)
    status = sink.status()
    assert adds_up(status)
    assert received.calls == (2 if is_tried_again else 1)
    assert (status.acknowledged == status.made) == is_tried_again
    if not is_tried_again:
        assert status.lost == {"refused": status.made}
        assert code.name in status.reason


def test_a_grpc_back_end_that_hangs_is_left_in_time() -> None:
    ended, answered = threading.Event(), threading.Event()

    def hangs(_times: int, _context: grpc.ServicerContext) -> None:
        ended.wait(60)
        answered.set()

    with grpc_back_end(hangs) as received:
        sink = sink_to(
            f"http://127.0.0.1:{received.port}",
            {
                **TRACES_ONLY,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TIMEOUT": "600000",  # it does not end by itself
            },
        )
        sink.start()
        sink.take(FULL)
        until(lambda: received.calls > 0)
        sink.stop(0.5)
        assert not answered.is_set()
        ended.set()
    assert adds_up(sink.status())
    assert sink.status().acknowledged == 0
    assert sink.status().queued == 0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def tls_environ(certificates: Certificates, *, client: bool = True) -> dict[str, str]:
    environ = {**TRACES_ONLY, "OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificates.ca)}
    if client:
        environ["OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"] = str(certificates.client)
        environ["OTEL_EXPORTER_OTLP_CLIENT_KEY"] = str(certificates.client_key)
    return environ


@pytest.mark.parametrize("client", [True, False])
def test_grpc_with_certificates_of_both_sides(certificates: Certificates, client: bool) -> None:
    pair = (certificates.server_key.read_bytes(), certificates.server.read_bytes())
    asks = grpc.ssl_server_credentials([pair], certificates.ca.read_bytes(), True)
    with grpc_back_end(credentials=asks) as received:
        environ = tls_environ(certificates, client=client)
        environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "grpc"
        sink = sink_to(f"https://127.0.0.1:{received.port}", environ)
        sink.start()
        sink.take(FULL)
        sink.stop(20.0 if client else 1.0)
    assert adds_up(sink.status())
    assert (sink.status().acknowledged == sink.status().made) == client


class Takes(BaseHTTPRequestHandler):
    """Takes everything, and remembers how large it was and how it came."""

    protocol_version = "HTTP/1.1"
    server: TakingServer

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.rfile.read(length)
        self.server.seen.append((length, self.headers.get("Content-Encoding")))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Quiet."""


class TakingServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Takes)
        self.seen: list[tuple[int, str | None]] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A client without a certificate is no error of the test's."""


@contextmanager
def http_back_end(tls: ssl.SSLContext | None = None) -> Iterator[TakingServer]:
    server = TakingServer()
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.mark.parametrize("client", [True, False])
def test_http_with_certificates_of_both_sides(certificates: Certificates, client: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server, certificates.server_key)
    context.load_verify_locations(certificates.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    with http_back_end(context) as server:
        url = f"https://127.0.0.1:{server.server_port}"
        sink = sink_to(url, tls_environ(certificates, client=client))
        sink.start()
        sink.take(FULL)
        sink.stop(20.0 if client else 1.0)
    assert adds_up(sink.status())
    assert (sink.status().acknowledged == sink.status().made) == client


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificates_that_cannot_be_used_are_one_line(
    tmp_path: Path, protocol: str, content: str | None
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    environ = {
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str(file),
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
    }
    with pytest.raises(DsagentError, match=r"ca\.pem") as raised:
        sink_to("https://127.0.0.1:1", environ).start()
    assert "\n" not in str(raised.value)


def test_small_bodies_are_not_compressed() -> None:
    with http_back_end() as server:
        sink = sink_to(f"http://127.0.0.1:{server.server_port}", NO_METRICS)
        sink.start()
        sink.take(batch(events=(Event("child.started", 1, "x"),)))
        until(lambda: len(server.seen) == 1)
        sink.take(FULL)
        sink.stop(20.0)
    assert server.seen[0][1] is None
    assert server.seen[0][0] < 1024
    assert "gzip" in [encoding for _, encoding in server.seen]


def test_a_queue_on_disk_survives_the_agent(tmp_path: Path) -> None:
    """The back end is away while one agent runs, and back when the next one does."""
    port = free_port()
    queue = QueueOptions(tmp_path / "queue")
    first = sink_to(f"http://127.0.0.1:{port}", NO_METRICS, queue)
    first.start()
    first.take(FULL)
    first.stop(1.0)
    left = first.status()
    assert adds_up(left)
    assert left.queued == left.made
    assert left.failed == left.dropped == left.sent == 0
    assert "refused" in left.reason
    with grpc_back_end(port=port) as received:
        environ = {**NO_METRICS, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
        second = sink_to(f"http://127.0.0.1:{port}", environ, queue)
        second.start()
        until(lambda: second.status().queued == 0)
        second.stop(20.0)
    status = second.status()
    assert adds_up(status)
    assert (status.made, status.recovered) == (0, left.queued)
    assert status.acknowledged == left.queued
    assert len(received.spans) + len(received.logs) == left.queued
    assert [file for file in queue.directory.rglob("*") if file.is_file()] == []


CHILD = """
import sys, time
from made import account, batch
from dsagent.agent.sinks.otlp import OtlpSink
from dsagent.agent.sinks.otlp_config import otlp_config
from dsagent.agent.sinks.otlp_delivery import QueueOptions
from dsagent.agent.slo import Limits
from pathlib import Path

config = otlp_config({"OTEL_METRICS_EXPORTER": "none"}, sys.argv[1])
sink = OtlpSink(config, Limits(), queue=QueueOptions(Path(sys.argv[2])))
sink.start()
for number in range(2000):
    sink.take(batch(accounts=(account(f"r{number}", sampled=True, step_ids=()),)))
    print(number, flush=True)
    time.sleep(0.01)
"""


def test_a_killed_agent_leaves_what_was_stored(tmp_path: Path) -> None:
    port, fixtures = free_port(), Path(__file__).parents[1] / "fixtures"
    queue = QueueOptions(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, f"http://127.0.0.1:{port}", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(fixtures)},
        stdout=subprocess.DEVNULL,
    )
    until(lambda: len(list(tmp_path.glob("traces/*.otlp"))) >= 2)
    child.kill()
    child.wait(20)
    stored = len(list(tmp_path.glob("traces/*.otlp")))
    with grpc_back_end(port=port) as received:
        environ = {**NO_METRICS, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
        sink = sink_to(f"http://127.0.0.1:{port}", environ, queue)
        sink.start()
        recovered = sink.status().recovered
        until(lambda: sink.status().queued == 0)
        sink.stop(20.0)
    assert adds_up(sink.status())
    assert sink.status().lost == {}
    assert len(received.spans) == sink.status().acknowledged == recovered >= stored
    assert list(tmp_path.glob("traces/*")) == []


def test_a_folder_of_another_agents_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    queue = QueueOptions(tmp_path)
    first = sink_to("http://127.0.0.1:1", NO_METRICS, queue)
    first.start()
    second = sink_to("http://127.0.0.1:1", {}, queue)
    with pytest.raises(DsagentError, match="another agent's"):
        second.start()
    first.stop(0.1)
    third = sink_to("http://127.0.0.1:1", {}, queue)
    third.start()
    third.stop(0.1)


def test_a_queue_on_disk_outlasts_an_outage(tmp_path: Path) -> None:
    """Nothing is given up while one agent runs on, and nothing is sent twice."""
    down = threading.Event()
    down.set()

    def away_for_a_time(_times: int, context: grpc.ServicerContext) -> None:
        if down.is_set():
            context.set_trailing_metadata(retry_info(0.05))
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")

    with grpc_back_end(away_for_a_time) as received:
        sink = sink_to(
            f"http://127.0.0.1:{received.port}",
            {**TRACES_ONLY, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            QueueOptions(tmp_path),
        )
        sink.start()
        for number in range(20):
            accounts = (account(f"r{number}", sampled=True, step_ids=()),)
            sink.take(batch(accounts=accounts))
            until(lambda seen=number: received.calls > seen)  # type: ignore[misc]
        assert sink.status().acknowledged == 0
        down.clear()
        until(lambda: sink.status().queued == 0)
        sink.stop(20.0)
    status = sink.status()
    assert adds_up(status)
    assert status.acknowledged == status.made == len(received.spans)
    assert len({span.span_id for span in received.spans}) == len(received.spans)


def test_a_real_collector_passes_it_on() -> None:
    """rotel, of which none of this is ours: it takes HTTP with gzip and speaks gRPC to the next."""
    with grpc_back_end() as received, rotel(received.port) as port:
        sink = sink_to(f"http://127.0.0.1:{port}", {})
        sink.start()
        sink.take(FULL)
        sink.stop(20.0)
        assert sink.status().acknowledged == sink.status().made
        until(lambda: len(received.spans) >= sink.status().parts[0].acknowledged)
        until(lambda: len(received.logs) == sink.status().parts[2].acknowledged)
        until(lambda: len(received.metrics) > 0)
    root = next(span for span in received.spans if span.kind == span.SPAN_KIND_SERVER)
    assert root.trace_id == record("kept").trace_id.to_bytes(16, "big")
    assert {log.trace_id for log in received.logs if log.trace_id} == {root.trace_id}
