"""What listens, exposed: with a token and TLS, to clients of each kind and to a real Prometheus."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from made import batch, until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from otlp_back_ends import Certificates, free_port, make_certificates

from dsagent.agent.listening import pages
from dsagent.agent.listening.admission import Guard, ListenOptions
from dsagent.agent.sinks.prometheus import PrometheusSink
from dsagent.agent.slo import Limits
from dsagent.agent.sources.otlp_receiver.grpc_server import SERVICE
from dsagent.agent.sources.otlp_receiver.source import OtlpReceiver

TOKEN = "canary-0123456789abcdef"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}


def body(request_id: str) -> bytes:
    named = KeyValue(key="gen_ai.request.id", value=AnyValue(string_value=request_id))
    span = Span(trace_id=b"\1" * 16, span_id=b"\2" * 8, kind=2, attributes=[named])
    scope = ScopeSpans(spans=[span])
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[scope])]
    ).SerializeToString()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.fixture
def guard(certificates: Certificates, token_file: Path, tmp_path: Path) -> Guard:
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    shutil.copy(certificates.server, cert)
    shutil.copy(certificates.server_key, key)
    key.chmod(0o600)
    return Guard(ListenOptions(token_file, cert, key))


@pytest.fixture
def sink(guard: Guard) -> Iterator[PrometheusSink]:
    made = PrometheusSink("0.0.0.0", 0, Limits(), guard=guard)
    made.start()
    made.take(batch())
    yield made
    made.stop(5.0)


@pytest.fixture
def receiver(guard: Guard) -> Iterator[OtlpReceiver]:
    made = OtlpReceiver(("0.0.0.0", 0), ("0.0.0.0", 0), passes_on=False, guard=guard)
    made.start()
    yield made
    made.stop()


def https(
    port: int, certificates: Certificates, method: str, path: str, content: bytes, **headers: str
) -> int:
    context = ssl.create_default_context(cafile=str(certificates.ca))
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, content or None, sent)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def serial_of(port: int) -> str:
    """Of the certificate that is shown there."""
    shown = ssl.get_server_certificate(("127.0.0.1", port), timeout=20)
    ran = subprocess.run(
        ["openssl", "x509", "-noout", "-serial"],
        input=shown,
        text=True,
        capture_output=True,
        check=True,
    )
    return ran.stdout


def test_a_page_is_for_those_with_the_token_over_tls(
    sink: PrometheusSink, certificates: Certificates
) -> None:
    assert https(sink.port, certificates, "GET", "/metrics", b"", **BEARER) == 200
    assert https(sink.port, certificates, "GET", "/metrics", b"") == 401
    assert https(sink.port, certificates, "GET", "/metrics", b"", Authorization="Bearer x") == 401
    # What else there is, is not told either.
    assert https(sink.port, certificates, "GET", "/other", b"") == 401
    assert https(sink.port, certificates, "GET", "/other", b"", **BEARER) == 404
    until(lambda: sink.status().sent == 1)
    assert sink.status().dropped == 3
    assert sink.status().reason == "a client without the token"


def test_plain_http_to_a_port_with_tls_gets_nothing(
    sink: PrometheusSink, receiver: OtlpReceiver
) -> None:
    assert receiver.http is not None
    for port in (sink.port, receiver.http.port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            connection.request("GET", "/metrics", headers=BEARER)
            connection.getresponse()
        connection.close()
    until(lambda: sink.status().failed == 1)
    assert sink.status().sent == 0


def test_spans_are_taken_from_those_with_the_token_over_tls(
    receiver: OtlpReceiver, certificates: Certificates
) -> None:
    assert receiver.http is not None
    for headers, status in ((BEARER, 200), ({}, 401), ({"Authorization": "Bearer no"}, 401)):
        sent = {"Content_Type": PROTOBUF["Content-Type"], **headers}
        port = receiver.http.port
        assert https(port, certificates, "POST", "/v1/traces", body("a"), **sent) == status
    large = body("b") * 5000  # over many records of TLS
    sent = {"Content_Type": PROTOBUF["Content-Type"], **BEARER}
    assert https(receiver.http.port, certificates, "POST", "/v1/traces", large, **sent) == 200
    assert len(receiver.poll(10**9).engine_spans) > 1


def test_spans_over_grpc_too(receiver: OtlpReceiver, certificates: Certificates) -> None:
    assert receiver.grpc is not None
    where = f"127.0.0.1:{receiver.grpc.port}"
    credentials = grpc.ssl_channel_credentials(certificates.ca.read_bytes())
    with grpc.secure_channel(where, credentials) as channel:
        export = channel.unary_unary(f"/{SERVICE}/Export")
        token = ("authorization", BEARER["Authorization"])
        assert export(body("a"), timeout=20, metadata=[token]) == b""
        for metadata in ([], [("authorization", "Bearer no")], [token, token]):
            with pytest.raises(grpc.RpcError) as refused:
                export(body("b"), timeout=20, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert [span.request_id for span in receiver.poll(10**9).engine_spans] == ["a"]
    with grpc.insecure_channel(where) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(f"/{SERVICE}/Export")(body("c"), timeout=20, metadata=[token])


def test_a_renewed_certificate_is_shown_to_the_next_client(
    sink: PrometheusSink,
    receiver: OtlpReceiver,
    guard: Guard,
    tmp_path: Path,
) -> None:
    assert receiver.http is not None
    assert receiver.grpc is not None
    ports = (sink.port, receiver.http.port, receiver.grpc.port)
    before = {serial_of(port) for port in ports}
    assert len(before) == 1
    renewed = tmp_path / "renewed"
    renewed.mkdir()
    other = make_certificates(renewed)
    other.server.rename(tmp_path / "tls.crt")
    assert {serial_of(port) for port in ports} == before  # half of it is no pair
    assert "the old certificate stays" in sink.status().notice
    other.server_key.chmod(0o600)
    other.server_key.rename(tmp_path / "tls.key")
    after = {serial_of(port) for port in ports}
    assert len(after) == 1
    assert after != before
    assert sink.status().notice == ""


def test_silent_slow_and_talkative_clients_are_hung_up_on(
    sink: PrometheusSink, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One says nothing, one drips its handshake: neither is waited for by others."""
    monkeypatch.setattr(pages, "CONNECTION_DEADLINE_S", 0.5)  # of these two
    silent = socket.create_connection(("127.0.0.1", sink.port), timeout=20)
    dripping = socket.create_connection(("127.0.0.1", sink.port), timeout=20)
    dripping.sendall(b"\x16\x03\x01\x02")
    assert sink._server is not None
    opened, server = set[object](), sink._server

    def both_have_come() -> bool:
        opened.update(server._open)
        return len(opened) >= 2 or sink.status().dropped >= 2

    until(both_have_come)
    monkeypatch.setattr(pages, "CONNECTION_DEADLINE_S", 60.0)
    assert https(sink.port, certificates, "GET", "/metrics", b"", **BEARER) == 200
    for each in (silent, dripping):
        with each:
            assert each.recv(1) == b""
    until(lambda: sink.status().dropped == 2)


def test_a_huge_head_is_not_read_to_its_end() -> None:
    sink = PrometheusSink("127.0.0.1", 0, Limits())
    sink.start()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", sink.port, timeout=20)
        connection.putrequest("GET", "/metrics")
        for number in range(20):
            connection.putheader(f"x-{number}", "x" * 1000)
        connection.endheaders()
        assert connection.getresponse().status == 431
        connection.close()
        with socket.create_connection(("127.0.0.1", sink.port), timeout=20) as client:
            client.sendall(b"GET /" + b"x" * pages.MAX_HEAD_BYTES)
            with pytest.raises(ConnectionResetError):
                while client.recv(1):
                    pass
                raise ConnectionResetError  # an orderly end is as good
        until(lambda: sink.status().failed == 1)
    finally:
        sink.stop(5.0)


def test_prometheus_itself_scrapes_with_its_credentials_file(
    sink: PrometheusSink, certificates: Certificates, token_file: Path, tmp_path: Path
) -> None:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus here (apt install prometheus)")
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-token-at-all")
    target = [{"targets": [f"127.0.0.1:{sink.port}"]}]
    jobs = [
        {
            "job_name": name,
            "scheme": "https",
            "static_configs": target,
            "tls_config": {"ca_file": str(certificates.ca)},
            "authorization": {"credentials_file": str(file)},
        }
        for name, file in (("right", token_file), ("wrong", wrong))
    ]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(
            [
                binary,
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )

    def health() -> dict[str, tuple[str, str]]:
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/targets", timeout=5) as answer:
                found = json.load(answer)["data"]["activeTargets"]
        except OSError:
            return {}
        return {each["labels"]["job"]: (each["health"], each["lastError"]) for each in found}

    try:
        until(lambda: {each[0] for each in health().values()} == {"up", "down"}, 60.0)
        assert health()["right"] == ("up", "")
        assert health()["wrong"][0] == "down"
        assert "401" in health()["wrong"][1]
        # A new token, in both places, goes on without a restart.
        token_file.write_text("renewed-0123456789abcdef")
        sent = sink.status().sent
        until(lambda: sink.status().sent >= sent + 2, 60.0)
        assert health()["right"] == ("up", "")
    finally:
        child.terminate()
        child.wait(10)
