"""The payloads of the records in a ring: fixed numbers, then columns or capped strings.

An absent number is -1 (times and counts are never negative), an absent float
NaN, an absent string the length 0xFFFF: none of them is a 0 or an empty one.
What comes out of `decode` is valid or `Malformed` was raised.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dsagent.instrumentation.layout import MAX_SHARES, RecordKind
from dsagent.instrumentation.records import (
    Admission,
    Phase,
    RankStep,
    RequestOpen,
    RequestRecord,
    Share,
    Step,
)
from dsagent.instrumentation.tally import Tally, decode_tally, encode_tally

Record = Step | RankStep | RequestOpen | RequestRecord | Tally

REQUEST_ID_BYTES = 256
MODEL_BYTES = 256
TENANT_BYTES = 128
EXTERNAL_ID_BYTES = 256
LABEL_BYTES = 64  # operation, finish reason, error
ABSENT_LENGTH = 0xFFFF

# step_id, start, end, schedule, prepare, forward, sample, output (ns); prefill_tokens,
# decode_tokens, waiting, running, preempted, kv_blocks_used, kv_blocks_total, shares_omitted;
# admission, graph, shares.
STEP_HEAD = struct.Struct("<8Q8IBBH")
_RANK_STEP = struct.Struct("<QIQQq")  # step_id, rank, start, end, device
# key, trace id (two halves), span id, parent span id (0: none), received, sampled
_OPEN = struct.Struct("<QQQQQQB")
# the same, then tokenised, queued, first_scheduled, first_token, first_sent, finished, sent,
# prompt_tokens, output_tokens, cached_tokens, max_tokens, temperature, top_p
_CLOSE = struct.Struct("<QQQQQQB6qQ4qdd")
_LENGTH = struct.Struct("<H")
_SAMPLED = (False, True, None)


class Malformed(ValueError):  # noqa: N818  says what the bytes are
    """The bytes are no record of this version."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a ring's header says of all its records."""

    engine_id: int
    pid: int
    tid: int
    self_exported: bool


@functools.lru_cache(maxsize=MAX_SHARES + 1)
def share_columns(count: int) -> struct.Struct:
    """request_key; scheduled, cached, context tokens; output tokens; is_prefill; recompute."""
    return struct.Struct(f"<{count}Q{3 * count}I{count}H{2 * count}B")


@functools.lru_cache(maxsize=MAX_SHARES + 1)
def step_struct(count: int) -> struct.Struct:
    """A whole step of so many shares, so that it is packed by one call."""
    return struct.Struct(STEP_HEAD.format + share_columns(count).format[1:])


def _capped(text: str | None, limit_bytes: int) -> bytes:
    if text is None:
        return _LENGTH.pack(ABSENT_LENGTH)
    raw = text.encode("utf-8", "replace")
    if len(raw) > limit_bytes:
        raw = raw[:limit_bytes].decode("utf-8", "ignore").encode()
    return _LENGTH.pack(len(raw)) + raw


def _number(value: int | None) -> int:
    return -1 if value is None else value


def _float(value: float | None) -> float:
    return math.nan if value is None else value


def _sampled(flag: bool | None) -> int:
    return 2 if flag is None else int(flag)


def _identity(record: RequestOpen | RequestRecord) -> tuple[int, int, int, int, int, int, int]:
    return (
        record.request_key,
        record.trace_id >> 64,
        record.trace_id & (1 << 64) - 1,
        record.span_id,
        record.parent_span_id or 0,  # 0 is no valid span id
        record.received_ns,
        _sampled(record.sampled),
    )


def encode_step(step: Step) -> bytes:
    """The slow, general way; the writer's `write_step` is the one for an engine's loop."""
    shares = step.shares[:MAX_SHARES]
    omitted = step.shares_omitted + len(step.shares) - len(shares)
    head = (
        step.step_id, step.start_ns, step.end_ns, step.schedule_ns, step.prepare_ns,
        step.forward_ns, step.sample_ns, step.output_ns, step.prefill_tokens,
        step.decode_tokens, step.waiting, step.running, step.preempted, step.kv_blocks_used,
        step.kv_blocks_total, omitted, step.admission, step.graph, len(shares),
    )  # fmt: skip
    return step_struct(len(shares)).pack(
        *head,
        *(share.request_key for share in shares),
        *(share.scheduled_tokens for share in shares),
        *(share.cached_tokens for share in shares),
        *(share.context_tokens for share in shares),
        *(share.output_tokens for share in shares),
        *(share.phase is Phase.PREFILL for share in shares),
        *(share.recompute for share in shares),
    )


def encode(record: Record) -> tuple[RecordKind, bytes]:
    """Payload of a record. What the ring's header says of it (Origin) is not in it."""
    if isinstance(record, Step):
        return RecordKind.STEP, encode_step(record)
    if isinstance(record, RankStep):
        return RecordKind.RANK_STEP, _RANK_STEP.pack(
            record.step_id, record.rank, record.start_ns, record.end_ns, _number(record.device_ns)
        )
    if isinstance(record, Tally):
        return RecordKind.TALLY, encode_tally(record)
    if isinstance(record, RequestOpen):
        return RecordKind.REQUEST_OPEN, _OPEN.pack(*_identity(record)) + _capped(
            record.request_id, REQUEST_ID_BYTES
        )
    numbers = _CLOSE.pack(
        *_identity(record),
        _number(record.tokenised_ns),
        _number(record.queued_ns),
        _number(record.first_scheduled_ns),
        _number(record.first_token_ns),
        _number(record.first_sent_ns),
        _number(record.finished_ns),
        record.sent_ns,
        _number(record.prompt_tokens),
        record.output_tokens,
        _number(record.cached_tokens),
        _number(record.max_tokens),
        _float(record.temperature),
        _float(record.top_p),
    )
    return RecordKind.REQUEST_CLOSE, numbers + b"".join(
        (
            _capped(record.request_id, REQUEST_ID_BYTES),
            _capped(record.model, MODEL_BYTES),
            _capped(record.operation, LABEL_BYTES),
            _capped(record.tenant, TENANT_BYTES),
            _capped(record.external_id, EXTERNAL_ID_BYTES),
            _capped(record.finish_reason, LABEL_BYTES),
            _capped(record.error, LABEL_BYTES),
        )
    )


def decode(kind: int, payload: bytes, origin: Origin) -> Record:
    """The record in a payload whose CRC has been checked.

    Raises Malformed for anything that this version would not have written.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise Malformed(f"unknown kind {kind}")
    try:
        return decoder(payload, origin)
    except Malformed:
        raise
    except (struct.error, ValueError) as error:  # too short, or no such enum member
        raise Malformed(str(error)) from error


def _times(values: Iterable[int | None]) -> None:
    for value in values:
        if value is not None and value >> 63:
            raise Malformed("a time beyond 63 bits")


def _decode_step(payload: bytes, origin: Origin) -> Step:
    (
        step_id, start_ns, end_ns, schedule_ns, prepare_ns, forward_ns, sample_ns, output_ns,
        prefill_tokens, decode_tokens, waiting, running, preempted, kv_used, kv_total, omitted,
        admission, graph, count,
    ) = STEP_HEAD.unpack_from(payload)  # fmt: skip
    _times((start_ns, end_ns, schedule_ns, prepare_ns, forward_ns, sample_ns, output_ns))
    if count > MAX_SHARES or graph > 1 or step_id == 0 or end_ns < start_ns:
        raise Malformed("a step out of bounds")
    layout = share_columns(count)
    if len(payload) != STEP_HEAD.size + layout.size:
        raise Malformed("a step of the wrong size")
    columns = layout.unpack_from(payload, STEP_HEAD.size)
    return Step(
        engine_id=origin.engine_id,
        step_id=step_id,
        pid=origin.pid,
        tid=origin.tid,
        start_ns=start_ns,
        end_ns=end_ns,
        schedule_ns=schedule_ns,
        prepare_ns=prepare_ns,
        forward_ns=forward_ns,
        sample_ns=sample_ns,
        output_ns=output_ns,
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        waiting=waiting,
        running=running,
        preempted=preempted,
        kv_blocks_used=kv_used,
        kv_blocks_total=kv_total,
        admission=Admission(admission),
        graph=bool(graph),
        shares=_shares(columns, count),
        shares_omitted=omitted,
    )


def _shares(columns: Sequence[int], count: int) -> tuple[Share, ...]:
    if count == 0:
        return ()
    rows = zip(*(columns[at : at + count] for at in range(0, 7 * count, count)), strict=True)
    shares = []
    for key, scheduled, cached, context, output, is_prefill, recompute in rows:
        if key == 0 or is_prefill > 1 or recompute > 1:
            raise Malformed("a share out of bounds")
        phase = Phase.PREFILL if is_prefill else Phase.DECODE
        shares.append(Share(key, phase, scheduled, cached, context, output, bool(recompute)))
    return tuple(shares)


def _decode_rank_step(payload: bytes, origin: Origin) -> RankStep:
    if len(payload) != _RANK_STEP.size:
        raise Malformed("a rank step of the wrong size")
    step_id, rank, start_ns, end_ns, device_ns = _RANK_STEP.unpack(payload)
    _times((start_ns, end_ns))
    if step_id == 0 or end_ns < start_ns:
        raise Malformed("a rank step out of bounds")
    return RankStep(
        origin.engine_id,
        step_id,
        rank,
        origin.pid,
        origin.tid,
        start_ns,
        end_ns,
        _optional(device_ns),
    )


def _decode_tally(payload: bytes, origin: Origin) -> Tally:
    return decode_tally(payload, origin.engine_id, origin.pid)


def _optional(value: int) -> int | None:
    if value < -1:
        raise Malformed("a negative number")
    return None if value == -1 else value


def _optional_float(value: float) -> float | None:
    if math.isinf(value):
        raise Malformed("an infinite number")
    return None if math.isnan(value) else value


class _Strings:
    """Takes length-prefixed strings off a payload, each within its own limit, nothing left over."""

    def __init__(self, payload: bytes, at: int) -> None:
        self._payload = payload
        self._at = at

    def optional(self, limit_bytes: int) -> str | None:
        (length,) = _LENGTH.unpack_from(self._payload, self._at)
        self._at += _LENGTH.size
        if length == ABSENT_LENGTH:
            return None
        raw = self._payload[self._at : self._at + length]
        if length > limit_bytes or len(raw) != length:
            raise Malformed("a string out of bounds")
        self._at += length
        return raw.decode("utf-8")

    def required(self, limit_bytes: int) -> str:
        text = self.optional(limit_bytes)
        if text is None:
            raise Malformed("a string that must be there is absent")
        return text

    def end(self) -> None:
        if self._at != len(self._payload):
            raise Malformed("bytes left over")


def _check_identity(key: int, trace_id: int, span_id: int, sampled: int) -> None:
    if key == 0 or trace_id == 0 or span_id == 0 or sampled > 2:
        raise Malformed("ids out of bounds")


def _decode_open(payload: bytes, origin: Origin) -> RequestOpen:
    key, high, low, span_id, parent, received_ns, sampled = _OPEN.unpack_from(payload)
    _check_identity(key, high << 64 | low, span_id, sampled)
    _times((received_ns,))
    strings = _Strings(payload, _OPEN.size)
    request_id = strings.required(REQUEST_ID_BYTES)
    strings.end()
    return RequestOpen(
        request_key=key,
        request_id=request_id,
        trace_id=high << 64 | low,
        span_id=span_id,
        parent_span_id=parent or None,
        sampled=_SAMPLED[sampled],
        received_ns=received_ns,
        pid=origin.pid,
        tid=origin.tid,
    )


def _decode_close(payload: bytes, origin: Origin) -> RequestRecord:
    (
        key, high, low, span_id, parent, received_ns, sampled, tokenised, queued, first_scheduled,
        first_token, first_sent, finished, sent_ns, prompt_tokens, output_tokens, cached_tokens,
        max_tokens, temperature, top_p,
    ) = _CLOSE.unpack_from(payload)  # fmt: skip
    _check_identity(key, high << 64 | low, span_id, sampled)
    _times((received_ns, sent_ns))
    if sent_ns < received_ns or output_tokens < 0:
        raise Malformed("a request out of bounds")
    strings = _Strings(payload, _CLOSE.size)
    record = RequestRecord(
        request_key=key,
        request_id=strings.required(REQUEST_ID_BYTES),
        trace_id=high << 64 | low,
        span_id=span_id,
        parent_span_id=parent or None,
        sampled=_SAMPLED[sampled],
        model=strings.required(MODEL_BYTES),
        operation=strings.required(LABEL_BYTES),
        tenant=strings.optional(TENANT_BYTES),
        external_id=strings.optional(EXTERNAL_ID_BYTES),
        pid=origin.pid,
        tid=origin.tid,
        received_ns=received_ns,
        tokenised_ns=_optional(tokenised),
        queued_ns=_optional(queued),
        first_scheduled_ns=_optional(first_scheduled),
        first_token_ns=_optional(first_token),
        first_sent_ns=_optional(first_sent),
        finished_ns=_optional(finished),
        sent_ns=sent_ns,
        prompt_tokens=_optional(prompt_tokens),
        output_tokens=output_tokens,
        cached_tokens=_optional(cached_tokens),
        max_tokens=_optional(max_tokens),
        temperature=_optional_float(temperature),
        top_p=_optional_float(top_p),
        finish_reason=strings.optional(LABEL_BYTES),
        error=strings.optional(LABEL_BYTES),
        self_exported=origin.self_exported,
    )
    strings.end()
    return record


_DECODERS: dict[int, Callable[[bytes, Origin], Record]] = {
    RecordKind.STEP: _decode_step,
    RecordKind.RANK_STEP: _decode_rank_step,
    RecordKind.REQUEST_OPEN: _decode_open,
    RecordKind.REQUEST_CLOSE: _decode_close,
    RecordKind.TALLY: _decode_tally,
}
