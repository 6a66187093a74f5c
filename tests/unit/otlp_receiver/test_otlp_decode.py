"""The lean reader of trace requests against the generated classes, and against anything."""

from __future__ import annotations

import gzip
import zlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from dsagent.agent.facts import EngineSpan
from dsagent.agent.sources.otlp_receiver import decode as decoding
from dsagent.agent.sources.otlp_receiver.decode import (
    FIGURES,
    MAX_PID,
    PROCESS_ID,
    REQUEST_ID,
    decode,
)
from dsagent.agent.sources.otlp_receiver.inbox import (
    MAX_MEMBERS,
    MAX_PLAIN_BYTES,
    MAX_WAITING_SPANS,
    Inbox,
    TooLargeError,
    Verdict,
    gunzip,
)
from dsagent.agent.sources.otlp_receiver.wire import BadBodyError

KEYS = st.sampled_from([*REQUEST_ID, *sorted(FIGURES), "service.name", "gen_ai.request.top_p"])
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
VALUES = st.one_of(
    st.builds(AnyValue, string_value=TEXT),
    st.builds(AnyValue, int_value=st.integers(-(2**63), 2**63 - 1)),
    st.builds(AnyValue, double_value=st.floats()),
    st.builds(AnyValue, bool_value=st.booleans()),
    st.builds(AnyValue, bytes_value=st.binary(max_size=9)),
    st.builds(
        AnyValue,
        array_value=st.builds(
            ArrayValue, values=st.lists(st.builds(AnyValue, string_value=TEXT), max_size=2)
        ),
    ),
    st.just(AnyValue()),
)
ATTRIBUTES = st.lists(st.builds(KeyValue, key=KEYS, value=VALUES), max_size=6)


def spans() -> st.SearchStrategy[Span]:
    return st.builds(
        Span,
        trace_id=st.sampled_from([b"", b"\x01" * 16, bytes(16), b"\x02" * 15]),
        span_id=st.sampled_from([b"", b"\x03" * 8, bytes(8)]),
        parent_span_id=st.sampled_from([b"", b"\x04" * 8, b"\x04"]),
        trace_state=TEXT,
        name=TEXT,
        kind=st.sampled_from([0, 1, 2, 2, 2, 3]),
        start_time_unix_nano=st.integers(0, 2**64 - 1),
        end_time_unix_nano=st.integers(0, 2**64 - 1),
        attributes=ATTRIBUTES,
        events=st.lists(st.builds(Span.Event, name=TEXT, attributes=ATTRIBUTES), max_size=1),
        links=st.lists(st.builds(Span.Link, attributes=ATTRIBUTES), max_size=1),
        flags=st.integers(0, 2**32 - 1),
    )


OF_RESOURCES = st.lists(
    st.one_of(
        st.builds(KeyValue, key=KEYS, value=VALUES),
        st.builds(KeyValue, key=st.sampled_from(PROCESS_ID), value=VALUES),
        st.builds(
            KeyValue,
            key=st.sampled_from(PROCESS_ID),
            value=st.one_of(
                st.builds(AnyValue, int_value=st.sampled_from([0, 1, 77, MAX_PID, MAX_PID + 1])),
                st.builds(
                    AnyValue, string_value=st.sampled_from(["77", "-7", "７", "08", "9" * 9])
                ),
            ),
        ),
    ),
    max_size=4,
)


@st.composite
def requests(draw: st.DrawFn) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    for _ in range(draw(st.integers(0, 2))):
        resource = ResourceSpans(schema_url=draw(TEXT))
        resource.resource.attributes.extend(draw(OF_RESOURCES))
        for _ in range(draw(st.integers(0, 2))):
            scope = ScopeSpans(spans=draw(st.lists(spans(), max_size=3)))
            scope.scope.name = draw(TEXT)
            resource.scope_spans.append(scope)
        request.resource_spans.append(resource)
    return request


def process_of(resource: ResourceSpans) -> int | None:
    for attribute in resource.resource.attributes:
        which = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, which) if which else None
        if attribute.key not in PROCESS_ID or isinstance(value, bool):
            continue
        if isinstance(value, str) and set(value) <= set("0123456789") and 0 < len(value) < 8:
            value = int(value)
        if isinstance(value, int) and 1 <= value <= MAX_PID:
            return value
    return None


def expected(request: ExportTraceServiceRequest) -> list[EngineSpan]:
    """The same, read by the generated classes."""
    found = []
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                ids, figures = [], {}
                for attribute in span.attributes:
                    value = attribute.value
                    which = value.WhichOneof("value")
                    if attribute.key in REQUEST_ID and which == "string_value":
                        ids.append(value.string_value)
                    if attribute.key in FIGURES and which in ("int_value", "double_value"):
                        number = getattr(value, which)
                        if 0 <= number < 1e9:
                            figures[attribute.key] = number
                request_id = next(filter(None, ids), "")
                trace_id = span.trace_id if len(span.trace_id) == 16 else b""
                parent = span.parent_span_id if len(span.parent_span_id) == 8 else b""
                if span.kind == 2 and any(trace_id) and any(span.span_id) and request_id:
                    found.append(
                        EngineSpan(
                            trace_id=int.from_bytes(trace_id, "big"),
                            span_id=int.from_bytes(span.span_id, "big"),
                            parent_span_id=int.from_bytes(parent, "big") or None,
                            name=span.name,
                            scope=scope.scope.name,
                            request_id=request_id,
                            start_unix_ns=span.start_time_unix_nano,
                            end_unix_ns=span.end_time_unix_nano,
                            figures=figures,
                            process_id=process_of(resource),
                        )
                    )
    return found


@given(requests())
def test_it_reads_what_the_generated_classes_read(request: ExportTraceServiceRequest) -> None:
    received = decode(request.SerializeToString())
    assert list(received.of_requests) == expected(request)
    assert received.spans == sum(
        len(scope.spans) for each in request.resource_spans for scope in each.scope_spans
    )


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        received = decode(body)
    except BadBodyError:
        return
    # What lies deeper than we look may be wrong all the same; what we saw, others see too.
    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        return
    assert received.spans == sum(
        len(scope.spans) for each in request.resource_spans for scope in each.scope_spans
    )


@given(requests(), st.data())
def test_a_body_cut_short_or_changed_never_raises_anything_else(
    request: ExportTraceServiceRequest, data: st.DataObject
) -> None:
    body = bytearray(request.SerializeToString())
    if body:
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] ^= data.draw(st.integers(1, 255))
        del body[data.draw(st.integers(0, len(body))) :]
    answer = Inbox(passes_on=True).put(bytes(body))
    assert answer.verdict in (Verdict.TAKEN, Verdict.BAD)


def nested(*numbers: int, content: bytes = b"") -> bytes:
    """Sub-messages in each other, of these field numbers."""
    for number in reversed(numbers):
        length, prefix = len(content), bytearray()
        while length > 0x7F:
            prefix.append(length & 0x7F | 0x80)
            length >>= 7
        content = bytes((number << 3 | 2,)) + bytes((*prefix, length)) + content
    return content


def test_a_bomb_of_empty_messages_is_refused() -> None:
    with pytest.raises(BadBodyError, match="too many spans"):
        decode(nested(1, 2, content=b"\x12\x00" * 100_000))
    with pytest.raises(BadBodyError, match="too many fields"):
        decode(nested(1, 2, 2, content=b"\x4a\x00" * 1_000_000))
    with pytest.raises(BadBodyError, match="too many fields"):
        decode(b"\x0a\x00" * (decoding.MAX_FIELDS + 1))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\x0a", "breaks off"),
        (b"\x0a\x05ab", "breaks off"),
        (b"\x0a" + b"\xff" * 11, "ten bytes"),
        (b"\x00\x00", "number 0"),
        (b"\x0b", "wire type"),
    ],
)
def test_what_is_no_message_is_told(body: bytes, why: str) -> None:
    with pytest.raises(BadBodyError, match=why):
        decode(body)


def test_gzip_is_taken_in_one_piece_or_several_and_bombs_are_not() -> None:
    assert gunzip(gzip.compress(b"one") + gzip.compress(b"two")) == b"onetwo"
    assert gunzip(gzip.compress(b"x") * MAX_MEMBERS) == b"x" * MAX_MEMBERS
    with pytest.raises(BadBodyError, match="more than 16 gzip streams"):
        gunzip(gzip.compress(b"") * (MAX_MEMBERS + 1))
    with pytest.raises(TooLargeError):
        gunzip(gzip.compress(bytes(MAX_PLAIN_BYTES + 1)))
    with pytest.raises(TooLargeError):
        gunzip(gzip.compress(bytes(MAX_PLAIN_BYTES)) + gzip.compress(b"x"))
    with pytest.raises(BadBodyError, match="breaks off"):
        gunzip(gzip.compress(b"one")[:-3])
    with pytest.raises(BadBodyError, match="not gzip"):
        gunzip(zlib.compress(b"one"))


@given(st.binary(max_size=100))
def test_no_bytes_make_gunzip_raise_anything_else(body: bytes) -> None:
    try:
        gunzip(body)
    except BadBodyError:
        return


def one_span(name_bytes: int = 1, kind: Span.SpanKind.ValueType = 2) -> bytes:
    span = Span(trace_id=b"\1" * 16, span_id=b"\2" * 8, kind=kind, name="x" * name_bytes)
    span.attributes.append(KeyValue(key=REQUEST_ID[0], value=AnyValue(string_value="r")))
    scope = ScopeSpans(spans=[span])
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[scope])]
    ).SerializeToString()


def test_only_a_servers_span_stands_for_a_request() -> None:
    """The caller's own span of the same call may have the id, too."""
    assert len(decode(one_span(kind=2)).of_requests) == 1
    for kind in (0, 1, 3, 4, 5):
        received = decode(one_span(kind=kind))
        assert (received.spans, received.of_requests) == (1, ())


def test_what_cannot_be_passed_on_is_refused_for_now() -> None:
    inbox, body = Inbox(passes_on=True), one_span(1 << 20)
    verdicts = [inbox.put(body).verdict for _ in range(17)]
    assert verdicts == [Verdict.TAKEN] * 15 + [Verdict.BUSY] * 2
    spans, bodies = inbox.take()
    assert (len(spans), len(bodies)) == (15, 15)
    assert bodies[0].data == body
    assert inbox.put(body).verdict is Verdict.TAKEN


def test_what_nobody_fetches_is_dropped_and_counted() -> None:
    inbox = Inbox(passes_on=False)
    for _ in range(MAX_WAITING_SPANS + 3):
        inbox.put(one_span())
    assert inbox.dropped == 3
    spans, bodies = inbox.take()
    assert (len(spans), bodies) == (MAX_WAITING_SPANS, [])
