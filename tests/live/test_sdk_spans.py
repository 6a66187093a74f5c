"""Spans emitted through the OpenTelemetry SDK, as a receiver that is not ours gets them, are
those that an agent makes from the same requests' records in the rings."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from dsagent.engine.observe import ADMITTED, RequestLife, StepReport, StepShare
from dsagent.instrumentation.records import RequestRecord, Step
from dsagent.instrumentation.reference import ReferenceObserver
from dsagent.instrumentation.ring import RingReader, find_rings
from dsagent.instrumentation.sdk import sdk_emitter
from dsagent.instrumentation.spans import Span, request_link, request_spans, step_span

ENGINE_ID = 31
STEPS = 14
Comparable = tuple[Any, ...]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(observer: ReferenceObserver, batch: int) -> None:
    """`batch` requests that all run in the same steps: a prefill, then decodes."""
    lives = [
        RequestLife(
            f"r{number}",
            "chat",
            "smollm2",
            received_ns=1_000,
            traceparent=f"00-{number + 1:032x}-{7:016x}-01" if number % 2 else None,
            queued_ns=1_100,
            first_scheduled_ns=2_000,
            temperature=0.0,
            prompt_tokens=8,
            output_tokens=STEPS,
        )
        for number in range(batch)
    ]
    for life in lives:
        observer.request_opened(life)
    for step_id in range(1, STEPS + 1):
        start_ns = step_id * 10_000
        first = step_id == 1
        shares = [
            StepShare(life.request_id, first, 8 if first else 1, 0, 8 + step_id, 1, False)
            for life in lives
        ]
        observer.step_finished(
            StepReport(
                step_id, start_ns, start_ns + 5_000 + step_id, 100, 100, 4_000, 100, 100,
                8 * batch if first else 0, 0 if first else batch, 0, batch, 0, batch, 1_000,
                ADMITTED, False, shares,
            )
        )  # fmt: skip
    for life in lives:
        life.first_token_ns, life.first_sent_ns = 15_001, 15_500
        life.finished_ns = life.sent_ns = STEPS * 10_000 + 6_000
        life.finish_reason = "abort" if life.request_id == "r0" else "stop"
        observer.request_closed(life)


def from_records() -> list[Span]:
    """As the agent would make them, the engine exporting none."""
    records: list[RequestRecord] = []
    steps: list[Step] = []
    for candidate in find_rings(os.getpid()):
        reader = RingReader.open(candidate)
        if reader.header.engine_id == ENGINE_ID:
            for record in reader.read(100_000):
                if isinstance(record, RequestRecord):
                    records.append(replace(record, self_exported=False))
                elif isinstance(record, Step):
                    steps.append(record)
            assert reader.counters.uncounted_loss == 0
        reader.close()
    by_key = {record.request_key: record for record in records}
    spans = [span for record in records for span in request_spans(record, steps, parts=None)]
    return spans + [
        step_span(step, [request_link(by_key[share.request_key], share) for share in step.shares])
        for step in steps
    ]


def value_of(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return tuple(value_of(item) for item in value.array_value.values)
    return getattr(value, kind)


def comparable_wire(span: WireSpan) -> Comparable:
    def attributes(pairs: Any) -> dict[str, object]:
        return {pair.key: value_of(pair.value) for pair in pairs}

    assert span.dropped_links_count == span.dropped_attributes_count == 0
    return (
        int.from_bytes(span.trace_id, "big"),
        int.from_bytes(span.span_id, "big"),
        int.from_bytes(span.parent_span_id, "big") or None,
        span.name,
        WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        span.end_time_unix_nano - span.start_time_unix_nano,
        attributes(span.attributes),
        [
            (
                int.from_bytes(link.trace_id, "big"),
                int.from_bytes(link.span_id, "big"),
                attributes(link.attributes),
            )
            for link in span.links
        ],
        span.status.message if span.status.code == 2 else None,
    )


def comparable(span: Span) -> Comparable:
    return (
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.name,
        span.kind,
        span.end_ns - span.start_ns,
        dict(span.attributes),
        [(link.trace_id, link.span_id, dict(link.attributes)) for link in span.links],
        span.error,
    )


async def received(port: int, batch: int, count: int) -> tuple[list[Span], Sequence[WireSpan]]:
    """What is made from the records, and `count` spans from the receiver."""
    settings = OtelTapHttpProtobufReceiverSettings(http_port=port)
    async with OtelTapHttpProtobufReceiver(settings) as tap:

        async def take() -> list[WireSpan]:
            stream = tap.stream_traces()
            return [await anext(stream) for _ in range(count)]

        taking = asyncio.create_task(take())
        await asyncio.sleep(0)  # it listens from its first step on
        observer = ReferenceObserver(engine_id=ENGINE_ID, exporter=sdk_emitter(engine_id=ENGINE_ID))
        serve(observer, batch)
        expected = from_records()
        await asyncio.to_thread(observer.close)
        return expected, await asyncio.wait_for(taking, 60)


@pytest.mark.parametrize("batch", [1, 200])
def test_the_sdk_and_the_records_make_the_same_spans(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10000")
    # Of each request its own, queue, prefill, decode and the ten slowest steps.
    count = batch * 14 + STEPS
    expected, got = asyncio.run(received(port, batch, count))
    assert len(expected) == count
    order = {(span.trace_id, span.span_id): at for at, span in enumerate(expected)}
    arrived = sorted((comparable_wire(span) for span in got), key=lambda span: order[span[:2]])
    assert arrived == [comparable(span) for span in expected]
    steps = [span for span in got if span.name == "engine step"]
    assert {len(span.links) for span in steps} == {batch}
    servers = {span.name for span in got if span.kind == WireSpan.SPAN_KIND_SERVER}
    assert servers == {"chat smollm2"}
