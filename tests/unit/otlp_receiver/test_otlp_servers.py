"""The two servers on real sockets: what they take, what they refuse and with which status."""

from __future__ import annotations

import gzip
import select
import socket
import struct
from collections.abc import Iterator
from http.client import HTTPConnection, RemoteDisconnected
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made import until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening.admission import Guard
from dsagent.agent.sources.otlp_receiver.http_head import RefusedError, parse_head
from dsagent.agent.sources.otlp_receiver.http_server import MAX_CONNECTIONS, HttpServer
from dsagent.agent.sources.otlp_receiver.inbox import MAX_BODY_BYTES, MAX_PLAIN_BYTES, Inbox
from dsagent.agent.sources.otlp_receiver.source import OtlpReceiver, refuse_loop

grpc = pytest.importorskip("grpc")

PROTOBUF = {"Content-Type": "application/x-protobuf"}
METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def body(request_id: str = "req-1") -> bytes:
    span = Span(trace_id=b"\1" * 16, span_id=b"\2" * 8, kind=2, name="llm_request")
    value = AnyValue(string_value=request_id)
    span.attributes.append(KeyValue(key="gen_ai.request.id", value=value))
    scope = ScopeSpans(spans=[span, Span(name="other")])
    resource = ResourceSpans(scope_spans=[scope])
    return ExportTraceServiceRequest(resource_spans=[resource]).SerializeToString()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(passes_on=True)


@pytest.fixture
def http(inbox: Inbox) -> Iterator[HttpServer]:
    server = HttpServer(
        "127.0.0.1", 0, inbox, Guard(), request_deadline_s=20.0, idle_deadline_s=1.0
    )
    server.start()
    yield server
    server.stop()
    assert server.held_bytes == 0
    assert not server.connections


def post(
    server: HttpServer,
    content: bytes,
    headers: dict[str, str] | None = None,
    *,
    method: str = "POST",
    path: str = "/v1/traces",
) -> tuple[int, bytes, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request(method, path, content, PROTOBUF if headers is None else headers)
    answer = connection.getresponse()
    result = answer.status, answer.read(), dict(answer.headers)
    connection.close()
    return result


def raw(server: HttpServer, *pieces: bytes) -> bytes:
    """All that comes back for these bytes until the other end closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except ConnectionError:
                break
        received = bytearray()
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionResetError:
            received += b"<reset>"
        return bytes(received)


def test_http_takes_protobuf_plain_and_gzip_and_keeps_it_unchanged(
    http: HttpServer, inbox: Inbox
) -> None:
    assert post(http, body("a"))[:2] == (200, b"")
    zipped = {**PROTOBUF, "Content-Encoding": "gzip"}
    assert post(http, gzip.compress(body("b")), zipped)[0] == 200
    spans, bodies = inbox.take()
    assert [span.request_id for span in spans] == ["a", "b"]
    assert [(each.data, each.spans) for each in bodies] == [(body("a"), 2), (body("b"), 2)]
    assert inbox.counts()[1] == {"request": 2, "other": 2}


def test_one_connection_serves_many_requests_even_all_at_once(
    http: HttpServer, inbox: Inbox
) -> None:
    one = b"POST /v1/traces HTTP/1.1\r\nContent-Type: application/x-protobuf\r\n"
    one += b"Content-Length: %d\r\n\r\n" % len(body()) + body()
    answers = raw(http, one * 3)  # then idle, until the server has had enough
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert len(inbox.take()[0]) == 3


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (404, {"path": "/v1/metrics"}),
        (405, {"method": "GET"}),
        (415, {"headers": {"Content-Type": "application/json"}}),
        (415, {"headers": {**PROTOBUF, "Content-Encoding": "zstd"}}),
        (400, {"headers": {**PROTOBUF, "Content-Encoding": "gzip"}}),
        (400, {"content": b"\xff\xff\xff"}),
        (411, {"headers": {**PROTOBUF, "Transfer-Encoding": "chunked"}}),
        (413, {"headers": {**PROTOBUF, "Content-Length": str(MAX_BODY_BYTES + 1)}}),
    ],
)
def test_http_says_what_is_wrong(
    http: HttpServer, inbox: Inbox, status: int, change: dict[str, Any]
) -> None:
    content = change.pop("content", body())
    answer = post(http, content, change.pop("headers", None), **change)
    assert answer[0] == status
    assert answer[1][:1] == b"\x12"  # google.rpc.Status.message
    assert inbox.counts()[0] == {("http", str(status)): 1}
    assert inbox.reason.startswith(f"http {status}: ")
    assert inbox.take() == ([], [])


def test_http_refuses_a_decompression_bomb(http: HttpServer, inbox: Inbox) -> None:
    bomb = gzip.compress(bytes(4 * MAX_PLAIN_BYTES))
    assert len(bomb) < 100_000
    assert post(http, bomb, {**PROTOBUF, "Content-Encoding": "gzip"})[0] == 413
    assert inbox.take() == ([], [])


def test_http_asks_to_come_again_where_nobody_fetches(http: HttpServer, inbox: Inbox) -> None:
    span = Span(name="x" * (3 << 20))
    resource = ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])
    large = ExportTraceServiceRequest(resource_spans=[resource]).SerializeToString()
    statuses = [post(http, large)[0] for _ in range(6)]
    assert statuses == [200] * 5 + [503]
    assert post(http, large)[2]["Retry-After"] == "1"
    inbox.take()
    assert post(http, large)[0] == 200


def test_http_does_not_wait_for_the_slow(http: HttpServer, inbox: Inbox) -> None:
    http.request_deadline_s = 0.3
    assert raw(http, b"POST /v1/tra").startswith(b"HTTP/1.1 408 ")
    head = b"POST /v1/traces HTTP/1.1\r\nContent-Type: application/x-protobuf\r\n"
    half = head + b"Content-Length: 100\r\n\r\nabc"
    assert raw(http, half).startswith(b"HTTP/1.1 408 ")
    assert raw(http) == b""  # says nothing at all
    assert inbox.counts()[0]["http", "408"] == 2


def test_http_goes_on_where_one_connection_fails(
    http: HttpServer, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_body: bytes) -> None:
        raise RuntimeError("unforeseen")

    with monkeypatch.context() as patched:
        patched.setattr(inbox, "put", fails)
        with pytest.raises(RemoteDisconnected):
            post(http, body())
    assert inbox.requests["http", "failed"] == 1
    assert "unforeseen" in inbox.reason
    assert post(http, body())[0] == 200


def test_http_has_a_limit_on_heads_and_on_connections(http: HttpServer, inbox: Inbox) -> None:
    endless = raw(http, b"POST /v1/traces HTTP/1.1\r\n", b"X: " + b"a" * (64 << 10))
    assert endless.startswith((b"HTTP/1.1 431 ", b"<reset>"))
    idle = [socket.create_connection(("127.0.0.1", http.port)) for _ in range(MAX_CONNECTIONS)]
    assert post(http, body())[0] == 200
    idle[0].settimeout(5.0)
    assert idle[0].recv(1) == b""  # the oldest idle one made room
    assert len(http.connections) <= MAX_CONNECTIONS
    for each in idle:
        each.close()
    until(lambda: not http.connections)
    busy = []
    for _ in range(MAX_CONNECTIONS):
        busy.append(socket.create_connection(("127.0.0.1", http.port)))
        busy[-1].sendall(b"P")
    until(lambda: sum(not each.is_idle for each in http.connections.values()) >= 1)
    for each in busy:
        each.close()
    until(lambda: not http.connections)
    assert post(http, body())[0] == 200


def test_http_counts_what_has_come_and_who_holds_most_gives_way(http: HttpServer) -> None:
    head = b"POST /v1/traces HTTP/1.1\r\nContent-Type: application/x-protobuf\r\n"
    head += b"Content-Length: %d\r\n\r\n" % MAX_BODY_BYTES
    begun = [socket.create_connection(("127.0.0.1", http.port), timeout=20) for _ in range(4)]
    for each in begun:
        each.sendall(head)
    until(lambda: sum(not each.is_idle for each in http.connections.values()) == 4)
    assert post(http, body())[0] == 200  # announcing is not holding

    for each in begun:
        each.sendall(bytes(MAX_BODY_BYTES - 1))
    until(lambda: http.held_bytes == 4 * (MAX_BODY_BYTES - 1))
    assert post(http, body())[0] == 200
    until(lambda: http.held_bytes == 3 * (MAX_BODY_BYTES - 1))
    (refused,), _, _ = select.select(begun, [], [], 20.0)
    assert refused.recv(4096).startswith(b"HTTP/1.1 503 ")
    for each in begun:
        each.close()
    until(lambda: http.held_bytes == 0)


def test_http_survives_a_client_that_resets(http: HttpServer) -> None:
    for _ in range(5):
        connection = socket.create_connection(("127.0.0.1", http.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(b"POST /v1/traces HTTP/1.1\r\nContent-Le")
        connection.close()
    assert post(http, body())[0] == 200


@given(st.binary(max_size=300))
def test_no_head_makes_it_raise_anything_else(head: bytes) -> None:
    for text in (head, b"POST /v1/traces HTTP/1.1\r\n" + head):
        try:
            parsed = parse_head(text, 1000)
        except RefusedError as refused:
            assert refused.status in (400, 404, 405, 411, 413, 415)
        else:
            assert 0 <= parsed.length <= 1000


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_no_bytes_end_the_http_server(http: HttpServer, pieces: list[bytes]) -> None:
    with socket.create_connection(("127.0.0.1", http.port)) as connection:
        connection.sendall(b"".join(pieces))
    assert post(http, body())[0] == 200
    http.inbox.take()


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver(None, ("127.0.0.1", 0), passes_on=True)
    receiver.start()
    yield receiver
    receiver.stop()


def call(receiver: OtlpReceiver, content: bytes, method: str = METHOD, **options: Any) -> bytes:
    assert receiver.grpc is not None
    limits = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{receiver.grpc.port}", limits) as channel:
        answer: bytes = channel.unary_unary(method)(content, timeout=20, **options)
        return answer


def test_grpc_takes_plain_and_gzip(receiver: OtlpReceiver) -> None:
    assert call(receiver, body("a")) == b""
    assert call(receiver, body("b"), compression=grpc.Compression.Gzip) == b""
    readings = receiver.poll(10**9)
    assert [span.request_id for span in readings.engine_spans] == ["a", "b"]
    assert [each.data for each in readings.otlp_bodies] == [body("a"), body("b")]
    assert {
        (sample.name, *sample.attributes.values()): sample.value for sample in readings.samples
    } == {
        ("dsagent.otlp_receiver.requests", "grpc", "OK"): 2,
        ("dsagent.otlp_receiver.spans", "request"): 2,
        ("dsagent.otlp_receiver.spans", "other"): 2,
    }
    assert receiver.status().state == "ok"


@pytest.mark.parametrize(
    ("code", "content", "options"),
    [
        ("INVALID_ARGUMENT", b"\xff\xff\xff", {}),
        ("RESOURCE_EXHAUSTED", bytes(MAX_BODY_BYTES + 1), {}),
        ("RESOURCE_EXHAUSTED", bytes(8 << 20), {"compression": grpc.Compression.Gzip}),
        ("UNIMPLEMENTED", b"", {"method": METHOD.replace("trace", "metrics")}),
    ],
)
def test_grpc_says_what_is_wrong(
    receiver: OtlpReceiver, code: str, content: bytes, options: dict[str, Any]
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call(receiver, content, **options)
    assert refused.value.code().name == code
    assert call(receiver, body()) == b""


def test_grpc_survives_what_is_not_http2(receiver: OtlpReceiver) -> None:
    assert receiver.grpc is not None
    for nonsense in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff",
    ):
        with socket.create_connection(("127.0.0.1", receiver.grpc.port), timeout=20) as connection:
            connection.sendall(nonsense)
    assert call(receiver, body()) == b""


def test_a_port_in_use_is_told_at_once(receiver: OtlpReceiver, http: HttpServer) -> None:
    assert receiver.grpc is not None
    with pytest.raises(DsagentError, match=r"cannot listen on .* --otlp-receive-grpc"):
        OtlpReceiver(("127.0.0.1", 0), ("127.0.0.1", receiver.grpc.port), passes_on=False)
    with pytest.raises(DsagentError, match=r"cannot listen on .* --otlp-receive HOST"):
        OtlpReceiver(("127.0.0.1", http.port), None, passes_on=False)


def test_the_agent_does_not_send_to_itself() -> None:
    refuse_loop(None, "127.0.0.1", 4318)
    refuse_loop(("127.0.0.1", 4318), "127.0.0.1", 4319)
    refuse_loop(("127.0.0.1", 4318), "collector", 4318)
    refuse_loop(("127.0.0.1", 4318), "127.9.9.9", 4318)
    refuse_loop(("0.0.0.0", 4318), "192.0.2.1", 4318)  # set apart for documents: nobody's
    refuse_loop(("0.0.0.0", 4318), "no-such-host.invalid", 4318)
    # By whichever of its addresses: they would go around for ever, and grow.
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9", socket.gethostname()):
        with pytest.raises(DsagentError, match="to itself"):
            refuse_loop(("0.0.0.0", 4318), host, 4318)
