"""Spans written by hand are what the generated classes read, whatever they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import ANCHOR, record, step
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from dsagent.agent.sinks import otlp_span
from dsagent.agent.sinks.otlp_encode import items_body
from dsagent.agent.sinks.otlp_span import MAX_REMEMBERED, span_bytes
from dsagent.instrumentation.spans import Link, Span, Value, request_link, step_span

TEXT = st.text(max_size=40)
VALUES: st.SearchStrategy[Value] = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-3, 3),
    st.floats(allow_nan=False),
    TEXT,
    st.lists(TEXT, max_size=3).map(tuple),
)
ATTRIBUTES = st.dictionaries(TEXT, VALUES, max_size=8)
IDS = st.integers(1, 2**64 - 1)
TRACE_IDS = st.integers(1, 2**128 - 1)
TIMES = st.integers(ANCHOR.mono_ns - ANCHOR.unix_ns, 2**62)
SPANS = st.builds(
    Span,
    name=TEXT,
    kind=st.sampled_from(["SERVER", "INTERNAL"]),
    trace_id=TRACE_IDS,
    span_id=IDS,
    parent_span_id=st.none() | IDS,
    start_ns=TIMES,
    end_ns=TIMES,
    attributes=ATTRIBUTES,
    links=st.lists(st.builds(Link, TRACE_IDS, IDS, ATTRIBUTES), max_size=3).map(tuple),
    error=st.none() | TEXT,
)


def plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def any_value(value: Value) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=plain(value))
    made = AnyValue()
    made.array_value.SetInParent()
    made.array_value.values.extend(AnyValue(string_value=plain(item)) for item in value)
    return made


def key_values(attributes: dict[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=plain(key), value=any_value(v)) for key, v in attributes.items()]


def message(span: Span) -> SpanMessage:
    """The same by the generated classes."""
    is_remote = span.kind == "SERVER" and span.parent_span_id is not None
    made = SpanMessage(
        trace_id=span.trace_id.to_bytes(16, "big"),
        span_id=span.span_id.to_bytes(8, "big"),
        parent_span_id=(
            b"" if span.parent_span_id is None else span.parent_span_id.to_bytes(8, "big")
        ),
        flags=0x301 if is_remote else 0x101,
        name=plain(span.name),
        kind=SpanMessage.SPAN_KIND_SERVER if span.kind == "SERVER" else 1,  # type: ignore[arg-type]
        start_time_unix_nano=ANCHOR.unix(span.start_ns),
        end_time_unix_nano=ANCHOR.unix(span.end_ns),
        attributes=key_values(dict(span.attributes)),
        links=[
            SpanMessage.Link(
                trace_id=link.trace_id.to_bytes(16, "big"),
                span_id=link.span_id.to_bytes(8, "big"),
                attributes=key_values(dict(link.attributes)),
                flags=0x101,
            )
            for link in span.links
        ],
    )
    if span.error is not None:
        made.status.code = 2  # type: ignore[assignment]
        made.status.message = plain(span.error)
    return made


@given(SPANS)
def test_the_generated_classes_read_the_same(span: Span) -> None:
    written = span_bytes(span, ANCHOR)
    assert SpanMessage.FromString(written) == message(span)
    assert span_bytes(span, ANCHOR) == written  # what is remembered is what was written


def test_a_yes_is_not_a_one() -> None:
    """They are equal to Python, and would share a place in a careless memory."""
    for value in (1, True, 1.0, 0, False):
        span = Span("s", "INTERNAL", 1, 1, None, 0, 0, {"same": value})
        assert SpanMessage.FromString(span_bytes(span, ANCHOR)).attributes[0].value == any_value(
            value
        )


def test_what_is_remembered_is_bounded() -> None:
    for number in range(3 * MAX_REMEMBERED):
        span_bytes(Span("s", "INTERNAL", 1, 1, None, 0, 0, {f"k{number}": 1}), ANCHOR)
    assert len(otlp_span._remembered) <= MAX_REMEMBERED


@pytest.mark.parametrize(
    "changes",
    [
        {"attributes": {"a": 2**63}},
        {"attributes": {"a": -(2**63) - 1}},
        {"trace_id": 2**128},
        {"trace_id": -1},
        {"span_id": 2**64},
        {"parent_span_id": 2**64},
        {"end_ns": 2**64},
        {"start_ns": -(2**70)},
    ],
)
def test_numbers_that_otlp_cannot_hold_are_errors(changes: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "name": "s",
        "kind": "INTERNAL",
        "trace_id": 1,
        "span_id": 1,
        "parent_span_id": None,
        "start_ns": 0,
        "end_ns": 0,
        "attributes": {},
    }
    with pytest.raises((ValueError, OverflowError)):
        span_bytes(Span(**{**fields, **changes}), ANCHOR)  # type: ignore[arg-type]


def test_long_text_is_cut_and_lone_surrogates_are_replaced() -> None:
    span = Span("s\ud800", "INTERNAL", 1, 1, None, 0, 0, {"a": "x" * 5000, "b": ("\udfff",)})
    read = SpanMessage.FromString(span_bytes(span, ANCHOR))
    assert read.name == "s?"
    assert len(read.attributes[0].value.string_value) == 1024
    assert read.attributes[1].value.array_value.values[0].string_value == "?"


def test_a_step_with_many_links() -> None:
    names = tuple(f"r{number}" for number in range(200))
    served = step(1, names)
    pairs = zip(map(record, names), served.shares, strict=True)
    span = step_span(served, [request_link(of, share) for of, share in pairs])
    assert SpanMessage.FromString(span_bytes(span, ANCHOR)) == message(span)


def test_a_body_is_what_the_generated_classes_read() -> None:
    spans = [Span(f"s{n}", "INTERNAL", n, n, None, 0, n, {"n": n}) for n in range(1, 300)]
    body = items_body([span_bytes(span, ANCHOR) for span in spans], {"service.name": "tried"})
    (of_resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert of_resource.resource.attributes[0].value.string_value == "tried"
    (of_scope,) = of_resource.scope_spans
    assert of_scope.scope.name == "dsagent"
    assert list(of_scope.spans) == [message(span) for span in spans]
    line = LogRecord(event_name="e")
    (of_logs,) = ExportLogsServiceRequest.FromString(
        items_body([line.SerializeToString()], {})
    ).resource_logs
    assert list(of_logs.scope_logs[0].log_records) == [line]
