"""Metrics and log lines as OTLP messages, and bodies to post. Times become wall-clock times here.

Spans (otlp_span.py) and log lines are serialised one by one, as they come; a body is then only put
together: memory holds bytes, not objects, and no item is encoded twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1 import resource_pb2

from dsagent.agent.facts import ClockAnchor
from dsagent.agent.metrics.catalog import TARGET_INFO
from dsagent.agent.metrics.exponential import ExponentialPoint
from dsagent.agent.metrics.series import Exemplar, Family, HistogramPoint, NumberPoint
from dsagent.agent.session.log_lines import SEVERITY_TEXT, LogLine
from dsagent.agent.sinks.otlp_wire import MAX_STRING_CHARS, clean_text, field
from dsagent.instrumentation import names
from dsagent.instrumentation.spans import Value

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

MAX_BODY_CHARS = 4096  # of a log line

_SAMPLED = 0x01
_CUMULATIVE = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE


def log_message(line: LogLine, anchor: ClockAnchor, observed_ns: int) -> logs_pb2.LogRecord:
    """One line; `observed_ns` (monotonic): when the agent knew of it."""
    message = logs_pb2.LogRecord(
        time_unix_nano=anchor.unix(line.mono_ns),
        observed_time_unix_nano=anchor.unix(observed_ns),
        severity_number=logs_pb2.SeverityNumber.ValueType(line.severity),
        severity_text=SEVERITY_TEXT.get(line.severity, ""),
        body=common_pb2.AnyValue(string_value=_text(line.text, MAX_BODY_CHARS)),
        event_name=_text(line.event_name),
    )
    if line.trace_id is not None:
        message.trace_id = line.trace_id.to_bytes(16, "big")
        message.flags = _SAMPLED
        if line.span_id is not None:
            message.span_id = line.span_id.to_bytes(8, "big")
    _fill(message.attributes, line.attributes)
    return message


def items_body(items: Iterable[bytes], resource: Mapping[str, str | int]) -> bytes:
    """An ExportTraceServiceRequest of serialised spans, or an ExportLogsServiceRequest of
    serialised log records: their fields have the same numbers."""
    of_scope = field(1, _scope().SerializeToString())
    of_scope += b"".join([field(2, item) for item in items])
    of_resource = field(1, _resource(resource).SerializeToString()) + field(2, of_scope)
    return field(1, of_resource)


def metrics_request(
    families: Sequence[Family],
    resource: Mapping[str, str | int],
    start_unix_ns: int,
    now_unix_ns: int,
) -> tuple[ExportMetricsServiceRequest, int]:
    """The request and the number of points in it. Histograms that are kept as exponential ones
    too go out as these."""
    metrics = [
        _metric(family, start_unix_ns, now_unix_ns)
        for family in families
        if family.metric is not TARGET_INFO  # the resource says the same
    ]
    points = sum(
        len(family.numbers) + len(family.histograms)
        for family in families
        if family.metric is not TARGET_INFO
    )
    scope_metrics = metrics_pb2.ScopeMetrics(scope=_scope(), metrics=metrics)
    request = ExportMetricsServiceRequest(
        resource_metrics=[
            metrics_pb2.ResourceMetrics(resource=_resource(resource), scope_metrics=[scope_metrics])
        ]
    )
    return request, points


def _metric(family: Family, start_unix_ns: int, now_unix_ns: int) -> metrics_pb2.Metric:
    metric = family.metric
    message = metrics_pb2.Metric(name=metric.name, unit=metric.unit, description=metric.description)
    numbers = [_number(point, start_unix_ns, now_unix_ns) for point in family.numbers]
    if metric.kind == "counter":
        message.sum.CopyFrom(
            metrics_pb2.Sum(
                data_points=numbers, aggregation_temporality=_CUMULATIVE, is_monotonic=True
            )
        )
    elif metric.kind == "gauge":
        message.gauge.CopyFrom(metrics_pb2.Gauge(data_points=numbers))
    elif any(point.exponential is not None for point in family.histograms):
        message.exponential_histogram.CopyFrom(
            metrics_pb2.ExponentialHistogram(
                data_points=[
                    _exponential(point, point.exponential, start_unix_ns, now_unix_ns)
                    for point in family.histograms
                    if point.exponential is not None
                ],
                aggregation_temporality=_CUMULATIVE,
            )
        )
    else:
        points = [_histogram(point, start_unix_ns, now_unix_ns) for point in family.histograms]
        message.histogram.CopyFrom(
            metrics_pb2.Histogram(data_points=points, aggregation_temporality=_CUMULATIVE)
        )
    return message


def _number(
    point: NumberPoint, start_unix_ns: int, now_unix_ns: int
) -> metrics_pb2.NumberDataPoint:
    message = metrics_pb2.NumberDataPoint(
        start_time_unix_nano=start_unix_ns,
        time_unix_nano=now_unix_ns,
        as_double=point.value,
    )
    _fill(message.attributes, dict(point.labels))
    return message


def _histogram(
    point: HistogramPoint, start_unix_ns: int, now_unix_ns: int
) -> metrics_pb2.HistogramDataPoint:
    message = metrics_pb2.HistogramDataPoint(
        start_time_unix_nano=start_unix_ns,
        time_unix_nano=now_unix_ns,
        count=sum(point.counts),
        sum=point.sum,
        bucket_counts=point.counts,
        explicit_bounds=point.bounds,
        exemplars=[_exemplar(e) for e in point.exemplars if e is not None],
    )
    _fill(message.attributes, dict(point.labels))
    return message


def _exponential(
    point: HistogramPoint, exponential: ExponentialPoint, start_unix_ns: int, now_unix_ns: int
) -> metrics_pb2.ExponentialHistogramDataPoint:
    message = metrics_pb2.ExponentialHistogramDataPoint(
        start_time_unix_nano=start_unix_ns,
        time_unix_nano=now_unix_ns,
        count=sum(point.counts),
        sum=point.sum,
        scale=exponential.scale,
        zero_count=exponential.zero_count,
        positive=metrics_pb2.ExponentialHistogramDataPoint.Buckets(
            offset=exponential.offset, bucket_counts=exponential.counts
        ),
        min=exponential.min,
        max=exponential.max,
        exemplars=[_exemplar(e) for e in point.exemplars if e is not None],
    )
    _fill(message.attributes, dict(point.labels))
    return message


def _exemplar(exemplar: Exemplar) -> metrics_pb2.Exemplar:
    return metrics_pb2.Exemplar(
        time_unix_nano=exemplar.unix_ns,
        as_double=exemplar.value,
        trace_id=exemplar.trace_id.to_bytes(16, "big"),
        span_id=exemplar.span_id.to_bytes(8, "big"),
    )


def _scope() -> common_pb2.InstrumentationScope:
    return common_pb2.InstrumentationScope(name=names.SCOPE, version=version("dsagent"))


def _resource(attributes: Mapping[str, str | int]) -> resource_pb2.Resource:
    resource = resource_pb2.Resource()
    _fill(resource.attributes, attributes)
    return resource


def _fill(
    target: RepeatedCompositeFieldContainer[common_pb2.KeyValue], attributes: Mapping[str, Any]
) -> None:
    """`attributes`: of type Value. Filled in place: a third of the cost of messages to be copied,
    and a step of 64 requests has 400 of them."""
    for key, value in attributes.items():
        _set(target.add(key=key).value, value)


def _set(target: common_pb2.AnyValue, value: Value) -> None:
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int):
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    elif isinstance(value, str):
        target.string_value = _text(value)
    else:
        for item in value:
            target.array_value.values.add(string_value=_text(item))


def _text(text: str, max_chars: int = MAX_STRING_CHARS) -> str:
    return clean_text(text, max_chars).decode()
