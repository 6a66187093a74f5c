"""Finished spans through the OpenTelemetry SDK, for people who run no agent.

The one importer of OpenTelemetry; itself imported only when somebody asks for
it. OTEL_* variables apply as in any program that uses the SDK: endpoint,
headers, sampler, resource, batch sizes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision

from dsagent.instrumentation import names
from dsagent.instrumentation.emitter import SpanEmitter
from dsagent.instrumentation.layout import MAX_SHARES
from dsagent.instrumentation.records import RequestRecord
from dsagent.instrumentation.spans import Span, request_spans

_log = logging.getLogger(__name__)

_KINDS = {"SERVER": trace.SpanKind.SERVER, "INTERNAL": trace.SpanKind.INTERNAL}
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_UNSAMPLED = trace.TraceFlags(trace.TraceFlags.DEFAULT)


def sdk_emitter(*, engine_id: int, service_name: str = "reference") -> SpanEmitter:
    """An emitter that exports over OTLP/HTTP as OTEL_EXPORTER_OTLP_* say."""
    pipeline = SdkPipeline(OTLPSpanExporter(), service_name=service_name)
    return SpanEmitter(pipeline, engine_id=engine_id)


class _GivenIds(IdGenerator):
    """The ids that the span about to be started already has. One thread starts spans."""

    trace_id = 1
    span_id = 1

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Counting(SpanExporter):
    """Counts what the exporter under it says: nothing else in the SDK tells truly."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class SdkPipeline:
    """An emitter's `Pipeline`. `emitted` - `exported` - `failed` is under way or was dropped by
    the SDK's own bounded queue."""

    def __init__(self, exporter: SpanExporter, *, service_name: str) -> None:
        self.emitted = 0
        self._counting = _Counting(exporter)
        self._ids = _GivenIds()
        self._processor = BatchSpanProcessor(self._counting)
        resource = Resource.create().merge(
            Resource(
                {
                    names.SERVICE_NAME: service_name,
                    names.SERVICE_INSTANCE_ID: str(uuid.uuid4()),
                    names.PROCESS_PID: os.getpid(),
                }
            )
        )
        # What OTEL_TRACES_SAMPLER says is asked once a request, at its end; after that, all
        # spans of a kept request are kept, and the steps that served it.
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=resource.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
            id_generator=self._ids,
            # The default drops links beyond 128: a step serves up to MAX_SHARES requests.
            span_limits=SpanLimits(max_links=MAX_SHARES, max_span_attributes=MAX_SHARES),
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer(names.SCOPE)

    @property
    def exported(self) -> int:
        return self._counting.exported

    @property
    def failed(self) -> int:
        return self._counting.failed

    def keeps(self, record: RequestRecord) -> bool:
        root = request_spans(record, (), parts=None)[0]
        flags = _SAMPLED if record.sampled else _UNSAMPLED
        decision = self._sampler.should_sample(
            _parent(root, flags), root.trace_id, root.name, _KINDS[root.kind], root.attributes
        ).decision
        return decision is Decision.RECORD_AND_SAMPLE

    def emit(self, spans: Sequence[Span]) -> None:
        """CLOCK_MONOTONIC becomes the wall clock here."""
        shift_ns = time.time_ns() - time.monotonic_ns()
        for span in spans:
            self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
            started = self._tracer.start_span(
                span.name,
                context=_parent(span, _SAMPLED),
                kind=_KINDS[span.kind],
                attributes=span.attributes,
                links=[
                    trace.Link(_remote(link.trace_id, link.span_id, _SAMPLED), link.attributes)
                    for link in span.links
                ],
                start_time=span.start_ns + shift_ns,
            )
            if span.error is not None:
                started.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
            started.end(span.end_ns + shift_ns)
            self.emitted += 1

    def stop(self, deadline_s: float) -> None:
        """Flush for at most so long: the SDK's own shutdown waits for a back end that hangs."""
        flush = threading.Thread(target=self._provider.shutdown, name="dsagent-flush", daemon=True)
        flush.start()
        flush.join(deadline_s)
        undelivered = self.emitted - self.exported
        if undelivered:
            _log.warning("%d of %d spans were not delivered", undelivered, self.emitted)


def _remote(trace_id: int, span_id: int, flags: trace.TraceFlags) -> trace.SpanContext:
    return trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)


def _parent(span: Span, flags: trace.TraceFlags) -> Context:
    """The context to start a span in: its parent's, or that of a root."""
    if span.parent_span_id is None:
        return Context()
    parent = trace.NonRecordingSpan(_remote(span.trace_id, span.parent_span_id, flags))
    return trace.set_span_in_context(parent, Context())
