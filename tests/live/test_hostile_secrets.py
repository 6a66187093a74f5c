"""Canaries are planted wherever a secret can be given; nothing that the agent says holds one."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from otlp_back_ends import free_port, grpc_back_end
from prometheus_client.parser import text_string_to_metric_families
from shell_lab import PATIENCE_S, Agent, Engine, dsagent
from sidecar_lab import Lab

from dsagent.agent.host.target import resolve
from dsagent.agent.session.normal_keeper import setting_of

CANARY = "canary"
TOKEN = f"{CANARY}-token-0123456789"
ARGUMENT = ("--api-key", f"{CANARY}-argument")  # of the server, as vLLM takes it
SLO = f"""
slo:
  - model: "*"
    ttft_ms: 0.001
webhook: "http://127.0.0.1:1/services/{CANARY}-path?key={CANARY}-query"
windows_divided_by: 3600
"""


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    """The environment and the files; back ends that refuse make the agent say what it failed at."""
    token, slo = tmp_path / "token", tmp_path / "slo.yaml"
    token.write_text(TOKEN)
    token.chmod(0o600)
    slo.write_text(SLO)
    return {
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {CANARY}-header",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:1/?token={CANARY}-otlp",
        "DSAGENT_REMOTE_WRITE": f"http://127.0.0.1:1/write?token={CANARY}-remote",
        "DSAGENT_PYROSCOPE": f"http://127.0.0.1:1/?token={CANARY}-pyroscope",
        "DSAGENT_SLO": str(slo),
        "DSAGENT_LISTEN_TOKEN_FILE": str(token),
        "HF_TOKEN": f"{CANARY}-of-the-environment",
    }


def page(port: int, path: str, token: str = TOKEN) -> str:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def send_a_span(port: int) -> None:
    """As an engine exports its own, with the token."""
    span = Span(trace_id=bytes(15) + b"1", span_id=bytes(7) + b"1", name="llm_request")
    resource = ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])
    posted = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/traces",
        ExportTraceServiceRequest(resource_spans=[resource]).SerializeToString(),
        {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/x-protobuf"},
    )
    with urllib.request.urlopen(posted, timeout=10) as answer:
        assert answer.status == 200


def recorded(folder: Path) -> str:
    """All that is in its files, decompressed."""
    texts = []
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".parquet":
            texts.append(str(pq.read_table(path).to_pylist()))
        elif path.is_file():
            texts.append(path.read_bytes().decode("utf-8", "replace"))
    assert texts, "something was recorded"
    return "\n".join(texts)


def wait_for_failures(port: int, *sinks: str) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        text = page(port, "/metrics")
        samples = (
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "dsagent_sink_failed_total"
        )
        failed = {each.labels["sink"] for each in samples if each.value > 0}
        if set(sinks) <= failed:
            return text
        assert time.monotonic() < deadline, f"only these have failed: {failed}"
        time.sleep(0.2)


def test_attach_shows_no_secret(secrets: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    with (
        Engine(more=ARGUMENT) as engine,
        Agent(
            engine.pid,
            *("--json", "--prometheus", f"127.0.0.1:{port}", "--record", str(tmp_path / "rec")),
            *("--otlp-queue", str(tmp_path / "queue"), "--without", "kernel"),
            env=secrets,
        ) as agent,
    ):
        agent.attached()
        for number in range(5):
            engine.do(f"request r{number}")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            page(port, "/metrics", "wrong-" + TOKEN)
        shown = [
            wait_for_failures(port, "remote_write"),
            Path(f"/proc/{agent.pid}/cmdline").read_text(),
            dsagent("explain", "--pid", str(engine.pid)).stdout,
            dsagent("why", "--pid", str(engine.pid), "--json").stdout,
            dsagent("status", "--pid", str(engine.pid), "--json", check=False).stdout,
        ]
        agent.process.terminate()
        assert agent.wait() == 0
        summary = agent.document()
    reasons = {sink["name"]: sink["reason"] for sink in summary["sinks"]}
    assert "127.0.0.1" in reasons["otlp"], "what failed is said"
    assert "127.0.0.1" in reasons["remote_write"]
    shown += ["\n".join(agent.out), "\n".join(agent.err), recorded(tmp_path / "rec")]
    for text in shown:
        assert CANARY not in text, text[max(0, text.find(CANARY) - 200) :][:400]


def test_the_sidecar_shows_no_secret(secrets: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    lab = Lab(f"secrets-{os.getpid()}")
    flags = ("--listen", f"127.0.0.1:{port}", "--record", str(tmp_path / "rec"))
    flags = (*flags, "--otlp-receive", "127.0.0.1:0")
    with (
        Engine(more=(lab.token, *ARGUMENT)) as engine,
        lab.sidecar(*flags, "--without", "kernel", env=secrets) as sidecar,
    ):
        sidecar.watching(engine.engine_pid)
        for number in range(5):
            engine.do(f"request r{number}")
        for path in ("/metrics", "/healthz", "/readyz"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                page(port, path, "wrong-" + TOKEN)
        send_a_span(sidecar.status()["receiver"]["ports"][0])
        shown = [
            wait_for_failures(port, "otlp", "remote_write", "otlp_forward"),
            page(port, "/healthz"),
            dsagent("explain", "--pid", str(engine.pid)).stdout,
            dsagent("status").stdout,
            dsagent("status", "--json").stdout,
            dsagent("status", "--pid", str(engine.pid), "--json").stdout,
        ]
        assert "127.0.0.1:1" in shown[-1], "what failed is said"
        sidecar.process.terminate()
        sidecar.wait()
    shown += ["\n".join(sidecar.out), "\n".join(sidecar.err), recorded(tmp_path / "rec")]
    for text in shown:
        assert CANARY not in text, text[max(0, text.find(CANARY) - 200) :][:400]


def test_what_is_kept_of_a_servers_arguments_holds_no_key() -> None:
    """normal.json, in the recording, says under which settings a server's steps took how long."""
    with Engine(more=ARGUMENT) as engine:
        kept = setting_of(resolve(engine.pid), "model").arguments
    assert kept.endswith("--api-key [secret]")


def test_a_targets_own_secrets_stay_its_own() -> None:
    """The agent reads what a target's environment says of its name and listeners, and no more of
    it goes out."""
    os.environ["HF_TOKEN"] = f"{CANARY}-of-the-target"
    try:
        with grpc_back_end() as back_end, Engine() as engine:
            endpoint = f"http://127.0.0.1:{back_end.port}"
            flags = ("--otlp-endpoint", endpoint, "--otlp-protocol", "grpc", "--without", "kernel")
            with Agent(engine.pid, "--json", "--sample-rate", "100%", *flags) as agent:
                agent.attached()
                engine.do("request r1")
                agent.process.terminate()
                assert agent.wait() == 0
            sent = f"{back_end.spans} {back_end.metrics} {back_end.logs}"
    finally:
        del os.environ["HF_TOKEN"]
    assert back_end.spans
    assert CANARY not in sent + "\n".join(agent.out + agent.err)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--otlp-endpoint", f"http://user:{CANARY}@127.0.0.1:4318"),
        ("--remote-write", f"http://user:{CANARY}@127.0.0.1:9090"),
        ("--pyroscope", f"http://user:{CANARY}@127.0.0.1:4040"),
        ("--remote-write", f"ftp://127.0.0.1/?token={CANARY}"),
    ],
)
def test_a_url_that_is_refused_is_not_repeated_with_its_secret(flag: str, value: str) -> None:
    with Engine() as engine:
        ran = dsagent("attach", str(engine.pid), flag, value, "--duration", "1", check=False)
    assert ran.returncode == 2
    assert CANARY not in ran.stdout + ran.stderr
