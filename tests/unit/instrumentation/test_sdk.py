"""Our end of the OpenTelemetry SDK: who is kept, what is counted, who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dsagent.instrumentation.records import RequestRecord
from dsagent.instrumentation.sdk import SdkPipeline
from dsagent.instrumentation.spans import request_spans

MakeRecord = Callable[..., RequestRecord]


class Refusing(SpanExporter):
    """A back end that refuses, or breaks."""

    def __init__(self, *, breaks: bool) -> None:
        self.breaks = breaks

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.breaks:
            raise ConnectionError("gone")
        return SpanExportResult.FAILURE


class Hanging(SpanExporter):
    def __init__(self) -> None:
        self.gate = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gate.wait()
        return SpanExportResult.SUCCESS


def test_a_span_comes_out_with_its_own_ids_times_and_resource(
    make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    exporter = InMemorySpanExporter()
    pipeline = SdkPipeline(exporter, service_name="reference")
    record = make_record(error="overloaded")
    pipeline.emit(request_spans(record, [], parts=None))
    pipeline.stop(10)
    root, queue = exporter.get_finished_spans()
    assert root.context is not None
    assert root.parent is not None
    assert (root.context.trace_id, root.context.span_id) == (record.trace_id, record.span_id)
    assert root.parent.span_id == record.parent_span_id
    assert queue.parent is not None
    assert queue.parent.span_id == record.span_id
    assert root.status.status_code is StatusCode.ERROR
    assert root.end_time is not None
    assert root.start_time is not None
    assert root.end_time - root.start_time == record.e2e_ns
    attributes = root.resource.attributes
    assert attributes["service.name"] == "reference"
    assert attributes["service.instance.id"]
    assert attributes["deployment.environment.name"] == "test"
    assert (pipeline.emitted, pipeline.exported, pipeline.failed) == (2, 2, 0)


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-prod")
    pipeline = SdkPipeline(InMemorySpanExporter(), service_name="reference")
    assert pipeline._provider.resource.attributes["service.name"] == "chat-prod"
    pipeline.stop(10)


@pytest.mark.parametrize(
    ("sampler", "sampled", "kept"),
    [
        (None, True, True),
        (None, None, True),
        (None, False, False),
        ("always_off", True, False),
        ("always_on", False, True),
        ("parentbased_always_off", None, False),
        ("parentbased_always_off", True, True),
    ],
)
def test_the_sampler_is_that_of_the_environment(
    make_record: MakeRecord,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str | None,
    sampled: bool | None,
    kept: bool,
) -> None:
    if sampler is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    pipeline = SdkPipeline(InMemorySpanExporter(), service_name="reference")
    parent = None if sampled is None else 5
    assert pipeline.keeps(make_record(sampled=sampled, parent_span_id=parent)) is kept
    pipeline.stop(10)


@pytest.mark.parametrize("breaks", [False, True])
def test_what_the_back_end_did_not_take_is_counted_and_told(
    make_record: MakeRecord, breaks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = SdkPipeline(Refusing(breaks=breaks), service_name="reference")
    pipeline.emit(request_spans(make_record(), [], parts=None))
    pipeline.stop(10)
    assert (pipeline.emitted, pipeline.exported, pipeline.failed) == (2, 0, 2)
    assert "2 of 2 spans were not delivered" in caplog.text


def test_a_back_end_that_hangs_does_not_hold_up_the_end(make_record: MakeRecord) -> None:
    exporter = Hanging()
    pipeline = SdkPipeline(exporter, service_name="reference")
    pipeline.emit(request_spans(make_record(), [], parts=None))
    pipeline.stop(0.1)
    assert pipeline.exported == 0
    exporter.gate.set()
