"""An independent client exports a span as vLLM makes it, for a request of a real engine: the
agent joins it to its account, passes it on unchanged, and doubles nothing.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from lab import DSAGENT, Engine, engine, wait_for_line
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings
from test_sinks_otlp import free_port

DEADLINE_S = 60.0
OF_TRACE = ("llm_request", "dsagent.account", "decode step")
CALLER = 0x00F067AA0BA902B7


@pytest.fixture(scope="module")
def target() -> Iterator[Engine]:
    with engine("tiny-llama") as served:
        yield served


def exporter(protocol: str, port: int) -> SpanExporter:
    if protocol == "grpc":
        return GrpcExporter(endpoint=f"http://127.0.0.1:{port}", insecure=True)
    return HttpExporter(f"http://127.0.0.1:{port}/v1/traces", compression=Compression.Gzip)


def ask_and_export(target: Engine, protocol: str, port: int, trace_id: int) -> tuple[str, str]:
    """One request, and the span that vLLM would make of it, by this client's own clock. Returns
    the request's id and the span's."""
    carrier = {"traceparent": f"00-{trace_id:032x}-{CALLER:016x}-01"}
    client = openai.OpenAI(base_url=f"http://{target.host}:{target.port}/v1", api_key="none")
    arrived_ns, first_ns, request_id = time.time_ns(), 0, ""
    with client:
        stream = client.completions.create(
            model=target.model,
            prompt="Where did the time go?",
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=carrier,
        )
        for chunk in stream:
            first_ns = first_ns or time.time_ns()
            request_id = request_id or chunk.id
            tokens = chunk.usage.completion_tokens if chunk.usage else 0
    ended_ns = time.time_ns()
    provider = TracerProvider(
        resource=Resource.create({"vllm.instrumenting_module_name": "vllm.llm_engine"}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter(protocol, port)))
    span = provider.get_tracer("vllm.tracing.otel").start_span(
        "llm_request",
        context=TraceContextTextMapPropagator().extract(carrier),
        kind=SpanKind.SERVER,
        start_time=arrived_ns,
        attributes={
            "gen_ai.request.id": request_id,
            "gen_ai.request.max_tokens": 12,
            "gen_ai.usage.completion_tokens": tokens,
            "gen_ai.latency.e2e": (ended_ns - arrived_ns) / 1e9,
            "gen_ai.latency.time_to_first_token": (first_ns - arrived_ns) / 1e9,
            "gen_ai.latency.time_in_queue": 31.0,  # it never was: must be noticed
        },
    )
    span.end(ended_ns)
    provider.shutdown()
    context = span.get_span_context()
    assert context.trace_id == trace_id
    return request_id, f"{context.span_id:016x}"


def explained(target: Engine, wanted: str) -> dict[str, Any]:
    """Asked again until the engine's span is in it."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        asked = subprocess.run(
            [str(DSAGENT), "explain", wanted, "--pid", str(target.pid), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        document: dict[str, Any] = json.loads(asked.stdout or "{}")
        if document.get("engine_span"):
            return document
        assert time.monotonic() < deadline, asked.stderr or document
        time.sleep(0.1)


def attach(target: Engine, *flags: str) -> subprocess.Popen[str]:
    agent = subprocess.Popen(
        [str(DSAGENT), "attach", str(target.pid), "--json", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_line(agent, "attached to")
    return agent


def end(agent: subprocess.Popen[str]) -> dict[str, Any]:
    agent.terminate()
    output, _ = agent.communicate(timeout=30)
    document: dict[str, Any] = json.loads(output)
    return document


def named(name: str, trace_id: bytes) -> Callable[[Span], bool]:
    return lambda span: span.name == name and span.trace_id == trace_id


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_engines_span_is_joined_passed_on_and_not_doubled(
    target: Engine, protocol: str
) -> None:
    port, scraped, trace_id = free_port(), free_port(), 0xC0FFEE << 80 | free_port()
    flag = "--otlp-receive" if protocol == "http" else "--otlp-receive-grpc"

    async def receive() -> tuple[list[Span], dict[str, Any], dict[str, Any], str]:
        tap_port = free_port()
        async with OtelTapHttpProtobufReceiver(
            OtelTapHttpProtobufReceiverSettings(tap_port)
        ) as tap:
            agent = await asyncio.to_thread(
                attach,
                target,
                *(flag, f"127.0.0.1:{port}"),
                *("--otlp-endpoint", f"http://127.0.0.1:{tap_port}"),
                *("--prometheus", f"127.0.0.1:{scraped}"),
            )
            raw_id = trace_id.to_bytes(16, "big")
            waits = [tap.await_trace(named(name, raw_id), DEADLINE_S) for name in OF_TRACE]
            waits.append(tap.await_trace(lambda span: span.name == "engine step", DEADLINE_S))
            arrived = asyncio.gather(*waits)
            try:
                request_id, span_id = await asyncio.to_thread(
                    ask_and_export, target, protocol, port, trace_id
                )
                document = await asyncio.to_thread(explained, target, request_id)
                spans = list(await arrived)
                with urllib.request.urlopen(f"http://127.0.0.1:{scraped}/metrics") as answer:
                    page = answer.read().decode()
            finally:
                summary = await asyncio.to_thread(end, agent)
            assert document["engine_span"]["span_id"] == span_id
            return spans, document, summary, page

    (theirs, ours, decode_step, step), document, summary, page = asyncio.run(receive())
    # One tree: the caller, the engine's span as it came, our account below it.
    assert theirs.parent_span_id == CALLER.to_bytes(8, "big")
    assert theirs.kind == Span.SPAN_KIND_SERVER
    attributes = {each.key: each.value for each in theirs.attributes}
    assert attributes["gen_ai.latency.time_in_queue"].double_value == 31.0
    assert ours.parent_span_id == theirs.span_id
    assert ours.kind == Span.SPAN_KIND_INTERNAL
    assert decode_step.trace_id == theirs.trace_id
    assert (step.links[0].trace_id, step.links[0].span_id) == (theirs.trace_id, theirs.span_id)
    # The figures: this client's agree with ours but for the one it made up.
    figures = {each["figure"]: each for each in document["engine_span"]["figures"]}
    assert not figures["gen_ai.latency.time_in_queue"]["agrees"]
    assert figures["gen_ai.usage.completion_tokens"]["agrees"]
    e2e = figures["gen_ai.latency.e2e"]
    assert e2e["engine"] >= e2e["ours"] > 0  # the client's reaches from before to after ours
    # Counted, and no second set of the standard metrics.
    assert 'dsagent_engine_span_spans_total{outcome="joined"} 1' in page
    assert f'requests_total{{protocol="{protocol}",code="' in page
    assert "gen_ai_server_request_duration" not in page
    assert "dsagent_requests_total{" in page
    sinks = {sink["name"]: sink for sink in summary["sinks"]}
    assert sinks["otlp_forward"]["sent"] == sinks["otlp_forward"]["acknowledged"] == 1
    assert sinks["otlp"]["failed"] == 0
    assert {"otlp"} <= {source["name"] for source in summary["sources"]}


def test_without_a_back_end_nothing_is_passed_on_and_without_its_span_a_request_is_ours(
    target: Engine,
) -> None:
    port, scraped = free_port(), free_port()
    agent = attach(
        target,
        *("--otlp-receive", f"127.0.0.1:{port}"),
        *("--prometheus", f"127.0.0.1:{scraped}"),
    )
    try:
        request_id, _ = ask_and_export(target, "http", port, 0xBEEF << 80 | 1)
        explained(target, request_id)
        client = openai.OpenAI(base_url=f"http://{target.host}:{target.port}/v1", api_key="none")
        with client:
            client.completions.create(model=target.model, prompt="Nobody tells.", max_tokens=4)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{scraped}/metrics") as answer:
                page = answer.read().decode()
            if "gen_ai_server_request_duration_seconds_count" in page:
                break  # the one without a span, once it is no longer waited for
            assert time.monotonic() < deadline, page
            time.sleep(0.2)
    finally:
        summary = end(agent)
    [count] = [line for line in page.splitlines() if "request_duration_seconds_count{" in line]
    assert count.endswith((" 1", " 1.0"))
    assert summary["requests"] == 2
    assert [sink["name"] for sink in summary["sinks"]] == ["prometheus"]


def test_the_agent_that_would_send_to_itself_is_refused(target: Engine) -> None:
    ran = subprocess.run(
        [
            *(str(DSAGENT), "attach", str(target.pid), "--otlp-receive", "127.0.0.1:4318"),
            *("--otlp-endpoint", "http://localhost:4318"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert ran.returncode == 2
    assert "to itself" in ran.stderr
