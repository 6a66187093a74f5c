"""A span as the bytes of an OTLP Span message.

Written straight in protobuf's wire format: a step that served 64 requests has 400 attributes, most
of them the same few again and again, and an object for each costs more than all else the agent
does with a span. The field numbers are those of opentelemetry/proto/trace/v1/trace.proto, and a
test reads the bytes back with the generated classes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from dsagent.agent.facts import ClockAnchor
from dsagent.agent.sinks.otlp_wire import clean_text, field, varint
from dsagent.instrumentation.spans import Link, Span, Value

_KINDS = {"SERVER": b"\x30\x02", "INTERNAL": b"\x30\x01"}  # field 6
_SAMPLED, _REMOTE_KNOWN, _REMOTE = 0x01, 0x100, 0x200
_TIMES = struct.Struct("<BQBQ")
_FLAGS = struct.Struct("<I")
_DOUBLE = struct.Struct("<d")
_LINK_FLAGS = b"\x35" + _FLAGS.pack(_SAMPLED | _REMOTE_KNOWN)  # field 6, fixed32
_INT_RANGE = range(-(1 << 63), 1 << 63)

# Attributes that come again: small numbers, phases, yes and no. Their bytes by key, type and value.
MAX_REMEMBERED = 4096
_MAX_REMEMBERED_INT = 4096
_MAX_REMEMBERED_CHARS = 32
_remembered: dict[tuple[str, type, Value], bytes] = {}


def span_bytes(span: Span, anchor: ClockAnchor) -> bytes:
    """One finished span. Raises ValueError or OverflowError for numbers that OTLP cannot hold."""
    parent = span.parent_span_id
    is_parent_remote = span.kind == "SERVER" and parent is not None
    flags = _SAMPLED | _REMOTE_KNOWN | (_REMOTE if is_parent_remote else 0)
    start, end = anchor.unix(span.start_ns), anchor.unix(span.end_ns)
    try:
        times = _TIMES.pack(0x39, start, 0x41, end)  # fields 7 and 8, fixed64
    except struct.error as error:
        raise ValueError(f"no time on the wall clock: {start}, {end}") from error
    pieces = [
        b"\x0a\x10",
        span.trace_id.to_bytes(16, "big"),
        b"\x12\x08",
        span.span_id.to_bytes(8, "big"),
        b"" if parent is None else b"\x22\x08" + parent.to_bytes(8, "big"),
        field(5, clean_text(span.name)),
        _KINDS[span.kind],
        times,
    ]
    pieces += _attributes(b"\x4a", span.attributes)  # field 9
    pieces += [field(13, _link(link)) for link in span.links]
    if span.error is not None:
        pieces.append(field(15, field(2, clean_text(span.error)) + b"\x18\x02"))  # code: ERROR
    pieces.append(b"\x85\x01" + _FLAGS.pack(flags))  # field 16, fixed32
    return b"".join(pieces)


def _link(link: Link) -> bytes:
    pieces = [
        b"\x0a\x10",
        link.trace_id.to_bytes(16, "big"),
        b"\x12\x08",
        link.span_id.to_bytes(8, "big"),
        *_attributes(b"\x22", link.attributes),  # field 4
        _LINK_FLAGS,
    ]
    return b"".join(pieces)


def _attributes(tag: bytes, attributes: Mapping[str, Value]) -> Iterable[bytes]:
    for key, value in attributes.items():
        content = _remembered.get((key, value.__class__, value))
        if content is None:
            content = _attribute(key, value)
        yield tag
        yield content


def _attribute(key: str, value: Value) -> bytes:
    """A KeyValue with its length before it."""
    content = field(1, clean_text(key)) + field(2, _any_value(value))
    content = varint(len(content)) + content
    if _comes_again(value):
        if len(_remembered) >= MAX_REMEMBERED:
            _remembered.clear()
        _remembered[key, value.__class__, value] = content
    return content


def _comes_again(value: Value) -> bool:
    if isinstance(value, int):  # a bool is one
        return -1 <= value <= _MAX_REMEMBERED_INT
    return isinstance(value, str) and len(value) <= _MAX_REMEMBERED_CHARS


def _any_value(value: Value) -> bytes:
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        if value not in _INT_RANGE:
            raise ValueError(f"{value} does not fit into 64 bits")
        return b"\x18" + varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if isinstance(value, float):
        return b"\x21" + _DOUBLE.pack(value)
    if isinstance(value, str):
        return field(1, clean_text(value))
    return field(5, b"".join([field(1, field(1, clean_text(item))) for item in value]))
