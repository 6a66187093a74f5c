"""An ExportTraceServiceRequest: how many spans it holds, and those that stand for a request.

Only that is read. Field numbers are those of opentelemetry/proto/trace/v1/trace.proto, which are
stable; a test holds this equal to the generated classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dsagent.agent.facts import EngineSpan
from dsagent.agent.sources.otlp_receiver.wire import I64, LEN, VARINT, BadBodyError, Reader

MAX_FIELDS = 200_000  # looked at, in one body: a tenth of a second
MAX_SPANS = 8192
MAX_ATTRIBUTES = 256  # of one span are looked at
MAX_TEXT_BYTES = 256
SERVER_KIND = 2

REQUEST_ID = ("gen_ai.request.id", "gen_ai.response.id")  # vLLM's name; the convention's
PROCESS_ID = (
    "process.pid",
    "vllm.process_id",
)  # of the resource: the convention's; vLLM's, as text
MAX_PID = 1 << 22  # of Linux
FIGURES = frozenset(
    {
        "gen_ai.latency.e2e",
        "gen_ai.latency.time_to_first_token",
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_in_model_prefill",
        "gen_ai.latency.time_in_model_decode",
        "gen_ai.latency.time_in_model_inference",
        "gen_ai.usage.prompt_tokens",
        "gen_ai.usage.completion_tokens",
    }
)


@dataclass(frozen=True, slots=True)
class Received:
    """What one request of the protocol brought."""

    spans: int
    of_requests: tuple[EngineSpan, ...]


def decode(body: bytes) -> Received:
    """Raises BadBodyError where it is not such a message, or too large a one."""
    reader = Reader(body, MAX_FIELDS)
    spans = 0
    of_requests: list[EngineSpan] = []
    for number, wire, a, b in reader.fields(0, len(body)):
        if number != 1 or wire != LEN:
            continue
        process_id: int | None = None
        of_process: list[EngineSpan] = []
        for inner, inner_wire, c, d in reader.fields(a, b):
            if inner_wire != LEN:
                continue
            if inner == 1:
                process_id = _process_id(reader, c, d)
            elif inner == 2:
                count, found = _scope_spans(reader, c, d)
                spans += count
                of_process += found
                if spans > MAX_SPANS:
                    raise BadBodyError("too many spans")
        of_requests += [replace(span, process_id=process_id) for span in of_process]
    return Received(spans, tuple(of_requests))


def _process_id(reader: Reader, start: int, end: int) -> int | None:
    """What a resource says of the process; None where that is no number, or nothing."""
    left = MAX_ATTRIBUTES
    for number, wire, a, b in reader.fields(start, end):
        if number != 1 or wire != LEN or not left:
            continue
        left -= 1
        key, value = _attribute(reader, a, b)
        if key not in PROCESS_ID:
            continue
        if isinstance(value, str) and value.isdecimal() and value.isascii() and len(value) < 8:
            value = int(value)
        if isinstance(value, int) and 0 < value <= MAX_PID:
            return value
    return None


def _scope_spans(reader: Reader, start: int, end: int) -> tuple[int, list[EngineSpan]]:
    scope = ""
    places: list[tuple[int, int]] = []
    for number, wire, a, b in reader.fields(start, end):
        if wire != LEN:
            continue
        if number == 1:
            for inner, inner_wire, c, d in reader.fields(a, b):
                if inner == 1 and inner_wire == LEN:
                    scope = reader.text(c, d, MAX_TEXT_BYTES)
        elif number == 2:
            places.append((a, b))
            if len(places) > MAX_SPANS:
                raise BadBodyError("too many spans")
    spans = (_span(reader, a, b, scope) for a, b in places)
    return len(places), [span for span in spans if span is not None]


def _span(reader: Reader, start: int, end: int, scope: str) -> EngineSpan | None:
    """None unless it is a SERVER span with the id of a request."""
    ids, times = {1: 0, 2: 0, 4: 0}, {7: 0, 8: 0}
    name, kind = "", 0
    attributes: list[tuple[int, int]] = []
    for number, wire, a, b in reader.fields(start, end):
        if wire == LEN:
            if number in ids:
                ids[number] = _id(reader.data[a:b], 16 if number == 1 else 8)
            elif number == 5:
                name = reader.text(a, b, MAX_TEXT_BYTES)
            elif number == 9 and len(attributes) < MAX_ATTRIBUTES:
                attributes.append((a, b))
        elif wire == VARINT and number == 6:
            kind = a
        elif wire == I64 and number in times:
            times[number] = reader.uint64(a)
    if kind != SERVER_KIND or not ids[1] or not ids[2]:
        return None
    request_id, figures = "", {}
    for a, b in attributes:
        key, value = _attribute(reader, a, b)
        if key in REQUEST_ID and isinstance(value, str):
            request_id = request_id or value
        elif key in FIGURES and isinstance(value, (int, float)) and 0 <= value < 1e9:
            figures[key] = value
    if not request_id:
        return None
    return EngineSpan(
        trace_id=ids[1],
        span_id=ids[2],
        parent_span_id=ids[4] or None,
        name=name,
        scope=scope,
        request_id=request_id,
        start_unix_ns=times[7],
        end_unix_ns=times[8],
        figures=figures,
    )


def _id(raw: bytes, length: int) -> int:
    """0, which is no id, where it has another length."""
    return int.from_bytes(raw, "big") if len(raw) == length else 0


def _attribute(reader: Reader, start: int, end: int) -> tuple[str, str | float | None]:
    """Key and value; None for values of other types than strings and numbers."""
    key, value = "", None
    for number, wire, a, b in reader.fields(start, end):
        if wire != LEN:
            continue
        if number == 1:
            key = reader.text(a, b, MAX_TEXT_BYTES)
        elif number == 2:
            value = _value(reader, a, b)
    return key, value


def _value(reader: Reader, start: int, end: int) -> str | float | None:
    value: str | float | None = None
    for number, wire, a, b in reader.fields(start, end):
        if number == 1 and wire == LEN:
            value = reader.text(a, b, MAX_TEXT_BYTES)
        elif number == 3 and wire == VARINT:
            value = a - (1 << 64) if a >> 63 else a
        elif number == 4 and wire == I64:
            number_found = reader.double(a)
            value = number_found if math.isfinite(number_found) else None
        else:
            value = None
    return value
