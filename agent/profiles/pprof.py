"""Profiles in pprof's format (profile.proto), written from its definition. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import TypeVar

from dsagent.agent.profiles.stacks import Frame
from dsagent.agent.sinks.otlp_wire import field, varint

MAX_LABEL_CHARS = 128
MAX_INT = (1 << 63) - 1

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Row:
    """A stack, the outermost frame first, with one value for each sample type."""

    frames: tuple[Frame, ...]
    values: tuple[int, ...]
    labels: Mapping[str, str] = attribute(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ValueType:
    """What a value counts, and in which unit."""

    name: str
    unit: str


CPU = ValueType("cpu", "nanoseconds")
SAMPLES = ValueType("samples", "count")


def encode(
    rows: Sequence[Row],
    types: Sequence[ValueType],
    *,
    period_type: ValueType,
    period: int,
    start_unix_ns: int,
    duration_ns: int,
) -> bytes:
    """A Profile message, not compressed. Text that is no Unicode is replaced, numbers are at least
    0: a reader need not be able to do what the format allows beyond that."""
    texts = _Table[str]()
    texts.index("")  # the first is the empty one, by definition
    functions, places = _Table[tuple[str, str]](), _Table[Frame]()
    out = [field(1, _value_type(each, texts)) for each in types]
    for row in rows:
        # Ids count from 1, and the innermost frame is the first.
        ids = [places.index(frame) + 1 for frame in reversed(row.frames)]
        labels = [
            field(3, _int(1, texts.index(key)) + _int(2, texts.index(value[:MAX_LABEL_CHARS])))
            for key, value in row.labels.items()
        ]
        out.append(field(2, _packed(1, ids) + _packed(2, row.values) + b"".join(labels)))
    for number, frame in enumerate(places, 1):
        function = functions.index((frame.function, frame.file)) + 1
        line = _int(1, function) + _int(2, frame.line)
        out.append(field(4, _int(1, number) + field(4, line)))
    for number, (name, file) in enumerate(functions, 1):
        at = texts.index(name)
        body = _int(1, number) + _int(2, at) + _int(3, at) + _int(4, texts.index(file))
        out.append(field(5, body))
    out.append(_int(9, start_unix_ns) + _int(10, duration_ns))
    out.append(field(11, _value_type(period_type, texts)) + _int(12, period))
    out += [field(6, text.encode("utf-8", "replace")) for text in texts]
    return b"".join(out)


class _Table(dict[K, int]):
    """Each once, by the order in which it came."""

    def index(self, key: K) -> int:
        return self.setdefault(key, len(self))


def _value_type(each: ValueType, texts: _Table[str]) -> bytes:
    return _int(1, texts.index(each.name)) + _int(2, texts.index(each.unit))


def _int(number: int, value: int) -> bytes:
    """A field of a number; 0 is the default and is left out, as all writers do."""
    return bytes((number << 3,)) + varint(min(value, MAX_INT)) if value > 0 else b""


def _packed(number: int, values: Sequence[int]) -> bytes:
    numbers = (varint(min(max(0, value), MAX_INT)) for value in values)
    return field(number, b"".join(numbers)) if values else b""
