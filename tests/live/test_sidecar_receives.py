"""Two real engines share the sidecar's OTLP receiver: an independent client exports a span for a
request of each, as vLLM does, and each is joined to the right account and passed on unchanged.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings
from shell_lab import Engine, add_up
from sidecar_lab import Lab, explained, until
from test_sinks_otlp import free_port

pytestmark = pytest.mark.usefixtures("the_only_sidecar")

DEADLINE_S = 60.0


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(f"{request.node.name}-{os.getpid()}")


def asked(engine: Engine, request_id: str) -> tuple[int, int]:
    """When the request began and ended, in wall-clock ns."""
    began_ns = time.time_ns()
    engine.do(f"request {request_id}")
    return began_ns, time.time_ns()


def export(
    exporter: SpanExporter, pid: int, request_id: str, trace_id: str, times: tuple[int, int]
) -> str:
    """A span as vLLM makes it, by OpenTelemetry's own SDK; returns its id."""
    resource = Resource.create({"vllm.process_id": str(pid)})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    caller = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    span = provider.get_tracer("vllm.tracing.otel").start_span(
        "llm_request",
        context=TraceContextTextMapPropagator().extract(caller),
        kind=SpanKind.SERVER,
        start_time=times[0],
        attributes={"gen_ai.request.id": request_id, "gen_ai.usage.completion_tokens": 6},
    )
    span.end(times[1])
    provider.shutdown()
    return f"{span.get_span_context().span_id:016x}"


def test_each_engines_span_is_joined_to_its_account_and_passed_on(lab: Lab) -> None:
    """Both requests have the same id, as where a router gives them one."""
    http, grpc = free_port(), free_port()

    async def story() -> list[Span]:
        back_end = free_port()
        settings = OtelTapHttpProtobufReceiverSettings(back_end)
        async with OtelTapHttpProtobufReceiver(settings) as tap:
            waits = [
                tap.await_trace(lambda span, t=trace: span.trace_id.hex() == t, DEADLINE_S)
                for trace in ("a" * 32, "b" * 32)
            ]
            arrived = asyncio.gather(*waits)
            await asyncio.to_thread(told, back_end)
            return list(await arrived)

    def told(back_end: int) -> None:
        receiving = ("--otlp-receive", f"127.0.0.1:{http}", "--otlp-receive-grpc")
        sending = ("--otlp-endpoint", f"http://127.0.0.1:{back_end}")
        flags = (*receiving, f"127.0.0.1:{grpc}", *sending)
        with lab.sidecar(*flags) as sidecar, lab.engine() as a, lab.engine() as b:
            sidecar.said("sidecar.sends of each engine: metrics: about .* time series")
            sidecar.said("sidecar.sends of each engine: traces: about .* spans and .* kB")
            for engine in (a, b):
                sidecar.watching(engine.engine_pid)
            until(lambda: sidecar.status()["receiver"]["state"] == "ok", "the receiver")
            times = {engine.engine_pid: asked(engine, "same") for engine in (a, b)}
            over_http = HttpExporter(
                f"http://127.0.0.1:{http}/v1/traces", compression=Compression.Gzip
            )
            over_grpc = GrpcExporter(f"http://127.0.0.1:{grpc}", insecure=True)
            span_ids = {}
            for engine, exporter, trace in ((a, over_http, "a"), (b, over_grpc, "b")):
                pid = engine.engine_pid
                span_ids[pid] = export(exporter, pid, "same", trace * 32, times[pid])
            for pid, span_id in span_ids.items():

                def joined(pid: int = pid) -> object:
                    document = explained("same", pid)
                    return document and document["engine_span"] and document

                document = until(joined, f"the span of {pid}'s request")
                assert document["engine_span"]["span_id"] == span_id
                add_up(document)
            page = sidecar.page("/metrics")[1]
            counts = re.findall(r"^dsagent_engine_span_spans_total\{(.*)\} 1\.0$", page, re.M)
            assert sorted(counts) == [f'engine="{n}",outcome="joined"' for n in (0, 1)]
            for protocol, code in (("http", "200"), ("grpc", "OK")):
                line = (
                    f'dsagent_otlp_receiver_requests_total{{protocol="{protocol}",code="{code}"}}'
                )
                assert f"{line} 1.0" in page
            receiver = sidecar.status()["receiver"]
            assert receiver["spans"] == {"request": 2, "other": 0}
            until(
                lambda: sidecar.status()["receiver"]["passed_on"]["acknowledged"] == 2,
                "both to be passed on",
            )

    spans = asyncio.run(story())
    for span in spans:
        assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
        assert span.parent_span_id.hex() == "00f067aa0ba902b7"


def test_with_a_token_it_takes_spans_from_those_who_send_it(lab: Lab, tmp_path: object) -> None:
    token = "t" * 32
    file = os.path.join(str(tmp_path), "token")
    with open(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as out:
        out.write(token)
    port = free_port()
    flags = ("--otlp-receive", f"127.0.0.1:{port}", "--listen-token-file", file)
    with lab.sidecar("--listen", "no", *flags) as sidecar, lab.engine() as engine:
        sidecar.watching(engine.engine_pid)
        until(lambda: sidecar.status()["receiver"]["state"] == "ok", "the receiver")
        times = asked(engine, "guarded")
        where = f"http://127.0.0.1:{port}/v1/traces"
        stranger = HttpExporter(where, timeout=5)
        export(stranger, engine.engine_pid, "guarded", "c" * 32, times)
        assert sidecar.status()["receiver"]["spans"] == {}
        friend = HttpExporter(where, headers={"Authorization": f"Bearer {token}"})
        span_id = export(friend, engine.engine_pid, "guarded", "d" * 32, times)

        def joined() -> object:
            document = explained("guarded")
            return document and document["engine_span"] and document

        assert until(joined, "its span")["engine_span"]["span_id"] == span_id
        assert token not in json.dumps(sidecar.status()) + "".join(sidecar.err)
