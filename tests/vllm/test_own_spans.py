"""vLLM's own telemetry: a real server exports its spans to the agent, which joins them to its
accounts; and a real mixture of experts (tiny DeepSeek-V2) tells how they are loaded.
"""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from vllm_lab import Server, one_server_at_a_time

pytestmark = pytest.mark.nightly  # a server of its own, with DeepSeek

DSAGENT = Path(sys.executable).with_name("dsagent")
PATIENCE_S = 180.0  # gRPC looks for a server that was not there ever more rarely
TRACE_ID, CALLER = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    self.server.spans.extend(scope.spans)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@dataclass(slots=True)
class Traced:
    server: Server
    spans: list[Span]  # that reached the collector behind the agent
    scraped: int
    said: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.scraped}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        pairs = (
            line.split(" # ")[0].rpartition(" ") for line in lines if line[:1] not in ("", "#")
        )
        return {name: float(value) for name, _, value in pairs}

    def explained(self, wanted: str) -> dict[str, Any] | None:
        asked = subprocess.run(
            [str(DSAGENT), "explain", wanted, "--pid", str(self.server.pid), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        return json.loads(asked.stdout) if asked.returncode == 0 else None

    def complete(self, tokens: int, **headers: str) -> str:
        body = {"prompt": "Where did the time go?", "max_tokens": tokens, "ignore_eos": True}
        reply = self.server.post("/v1/completions", body, headers)
        assert reply["usage"]["completion_tokens"] == tokens, reply
        return str(reply["id"])


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := true()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def traced(plugged: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    received, scraped = free_port(), free_port()
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    collector.spans = []  # type: ignore[attr-defined]
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    flags = ("--load-format", "dummy", "--dtype", "bfloat16")
    with one_server_at_a_time():
        server = Server(
            plugged.overlay.path,
            "tiny-deepseek-v2",
            tmp_path_factory.mktemp("traced"),
            *(*flags, "--otlp-traces-endpoint", f"http://127.0.0.1:{received}"),
        )
        try:
            server.wait_until_up()
            agent = subprocess.Popen(
                [
                    *(str(DSAGENT), "attach", str(server.pid), "--json"),
                    *("--otlp-receive-grpc", f"127.0.0.1:{received}"),
                    *("--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}"),
                    *("--prometheus", f"127.0.0.1:{scraped}"),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert agent.stderr is not None
            traced = Traced(server, collector.spans, scraped)  # type: ignore[attr-defined]
            for line in agent.stderr:
                traced.said.append(line)
                if line.startswith("attached to"):
                    break
            else:
                raise AssertionError("".join(traced.said))
            listener = threading.Thread(target=traced.said.extend, args=(agent.stderr,))
            listener.start()
            try:
                yield traced
            finally:
                agent.terminate()
                assert agent.stdout is not None
                summary = agent.stdout.read()
                agent.wait()
                listener.join()
                agent.stdout.close()
                agent.stderr.close()
            assert json.loads(summary)["uncounted_losses"] == 0
        finally:
            server.stop()
            collector.shutdown()
            collector.server_close()


def test_vllms_own_span_is_joined_and_agrees_with_our_account(traced: Traced) -> None:
    # Until vLLM's exporter has found us, its spans are lost.
    until(
        lambda: (
            traced.complete(2)
            and traced.metrics().get('dsagent_engine_span_spans_total{outcome="joined"}', 0) > 0
        ),
        "a span of vLLM's",
    )
    request_id = traced.complete(24, traceparent=f"00-{TRACE_ID:032x}-{CALLER:016x}-01")

    def joined() -> dict[str, Any] | None:
        document = traced.explained(request_id)
        return document if document and document["engine_span"] else None

    document = until(joined, "the span of our request")
    assert document["trace_id"] == f"{TRACE_ID:032x}"
    assert document["engine_span"]["name"] == "llm_request"
    figures = {each["figure"]: each for each in document["engine_span"]["figures"]}
    assert len(figures) == 8
    assert {name for name, each in figures.items() if not each["agrees"]} == set(), figures
    assert figures["gen_ai.usage.completion_tokens"]["ours"] == 24

    def of_trace(name: str) -> list[Span]:
        raw_id = TRACE_ID.to_bytes(16, "big")
        return [span for span in traced.spans if span.name == name and span.trace_id == raw_id]

    until(lambda: of_trace("llm_request") and of_trace("dsagent.account"), "both spans")
    [theirs], [ours] = of_trace("llm_request"), of_trace("dsagent.account")
    assert theirs.parent_span_id == CALLER.to_bytes(8, "big")
    assert ours.parent_span_id == theirs.span_id
    assert theirs.start_time_unix_nano == pytest.approx(ours.start_time_unix_nano, abs=10**9)
    until(lambda: [span for span in traced.spans if span.name == "engine step"], "the steps")
    links = {link.span_id for s in traced.spans if s.name == "engine step" for link in s.links}
    assert theirs.span_id in links
    assert not [name for name in traced.metrics() if name.startswith("gen_ai_server_request")]


def test_a_request_without_context_is_found_by_its_id(traced: Traced) -> None:
    request_id = traced.complete(4)
    document = until(
        lambda: (found := traced.explained(request_id)) and found["engine_span"] and found,
        "its span",
    )
    # The trace is vLLM's, who made up an id as we did.
    raw_id = bytes.fromhex(document["trace_id"])
    [theirs] = until(
        lambda: [s for s in traced.spans if s.name == "llm_request" and s.trace_id == raw_id],
        "vLLM's span, passed on",
    )
    assert theirs.span_id.hex() == document["engine_span"]["span_id"]


def test_the_experts_of_each_layer(traced: Traced) -> None:
    """2 of the 3 layers are mixtures of 8 experts, of which each token gets 2."""

    def loads() -> dict[str, float]:
        traced.complete(64)
        family = "dsagent_moe_expert_load_max_ratio{"
        return {n: v for n, v in traced.metrics().items() if n.startswith(family)}

    found = until(loads, "the load of the experts")
    layers = {name.split('"')[1] for name in found}
    assert len(layers) == 2, found
    assert all("layers." in layer for layer in layers)
    # The busiest gets at least the mean, and at most every token's one of two choices.
    assert all(1.0 <= ratio <= 4.0 for ratio in found.values())
    until(lambda: "dsagent_moe_expert_load_worst_ratio" in traced.metrics(), "the worst")
    worst = traced.metrics()["dsagent_moe_expert_load_worst_ratio"]
    assert worst == max(found.values()) or 1.0 <= worst <= 4.0
    assert not [name for name in traced.metrics() if "spec_decode" in name]  # absent, not 0
