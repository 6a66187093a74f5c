"""What goes into a ring comes out of it, and nothing else does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsagent.instrumentation import wire
from dsagent.instrumentation.records import (
    Admission,
    Phase,
    RankStep,
    RequestOpen,
    RequestRecord,
    Share,
    Step,
)

ORIGIN = wire.Origin(engine_id=9, pid=8, tid=7, self_exported=True)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
key = st.integers(1, 2**64 - 1)
time_ns = st.integers(0, 2**62)
length_ns = st.integers(0, 2**40)
shares = st.builds(
    Share, key, st.sampled_from(Phase), u32, u32, u32, st.integers(0, 65_535), st.booleans()
)
steps = st.builds(
    Step,
    engine_id=st.just(9),
    step_id=key,
    pid=st.just(8),
    tid=st.just(7),
    start_ns=time_ns,
    end_ns=st.just(2**62),
    schedule_ns=length_ns,
    prepare_ns=length_ns,
    forward_ns=length_ns,
    sample_ns=length_ns,
    output_ns=length_ns,
    prefill_tokens=u32,
    decode_tokens=u32,
    waiting=u32,
    running=u32,
    preempted=u32,
    kv_blocks_used=u32,
    kv_blocks_total=u32,
    admission=st.sampled_from(Admission),
    graph=st.booleans(),
    shares=st.lists(shares, max_size=70).map(tuple),
    shares_omitted=u32,
)
rank_steps = st.builds(
    RankStep,
    st.just(9),
    key,
    u32,
    st.just(8),
    st.just(7),
    time_ns,
    st.just(2**62),
    st.none() | time_ns,
)
opens = st.builds(
    RequestOpen,
    request_key=key,
    request_id=st.text(max_size=64),
    trace_id=st.integers(1, 2**128 - 1),
    span_id=key,
    parent_span_id=st.none() | key,
    sampled=st.none() | st.booleans(),
    received_ns=time_ns,
    pid=st.just(8),
    tid=st.just(7),
)
maybe_ns = st.none() | time_ns
maybe_float = st.none() | st.floats(0, 2)
closes = st.builds(
    RequestRecord,
    request_key=key,
    request_id=st.text(max_size=64),
    trace_id=st.integers(1, 2**128 - 1),
    span_id=key,
    parent_span_id=st.none() | key,
    sampled=st.none() | st.booleans(),
    operation=st.sampled_from(["chat", "text_completion"]),
    model=st.text(max_size=64),
    tenant=st.none() | st.text(max_size=32),
    external_id=st.none() | st.text(max_size=64),
    pid=st.just(8),
    tid=st.just(7),
    received_ns=time_ns,
    tokenised_ns=maybe_ns,
    queued_ns=maybe_ns,
    first_scheduled_ns=maybe_ns,
    first_token_ns=maybe_ns,
    first_sent_ns=maybe_ns,
    finished_ns=maybe_ns,
    sent_ns=st.just(2**62),
    prompt_tokens=st.none() | u32,
    output_tokens=u32,
    cached_tokens=st.none() | u32,
    max_tokens=st.none() | u32,
    temperature=maybe_float,
    top_p=maybe_float,
    finish_reason=st.none() | st.text(max_size=16),
    error=st.none() | st.text(max_size=16),
    self_exported=st.just(True),
)
records = steps | rank_steps | opens | closes


@given(records)
def test_every_record_comes_back_as_it_was(record: wire.Record) -> None:
    kind, payload = wire.encode(record)
    assert wire.decode(kind, payload, ORIGIN) == record


@given(records, st.data())
def test_a_payload_of_another_length_is_malformed(record: wire.Record, data: st.DataObject) -> None:
    kind, payload = wire.encode(record)
    cut = data.draw(st.integers(0, len(payload) - 1))
    for wrong in (payload[:cut], payload + b"\0"):
        with pytest.raises(wire.Malformed):
            wire.decode(kind, wrong, ORIGIN)


@given(st.integers(0, 6), st.binary(max_size=600))
def test_garbage_is_malformed_or_a_record_in_bounds(kind: int, payload: bytes) -> None:
    try:
        record = wire.decode(kind, payload, ORIGIN)
    except wire.Malformed:
        return
    # What was accepted is what this version writes for it (a NaN in other bits excepted).
    again = wire.encode(record)
    assert again[0] == kind
    assert wire.decode(*again, ORIGIN) == record


@given(closes, st.data())
def test_a_flipped_bit_never_raises_anything_else(
    record: RequestRecord, data: st.DataObject
) -> None:
    kind, payload = wire.encode(record)
    flipped = bytearray(payload)
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    try:
        wire.decode(kind, bytes(flipped), ORIGIN)
    except wire.Malformed:
        return


def test_absent_is_not_zero_nor_empty(make_record: Callable[..., RequestRecord]) -> None:
    nothing = make_record(
        tokenised_ns=None,
        queued_ns=None,
        first_scheduled_ns=None,
        first_token_ns=None,
        first_sent_ns=None,
        finished_ns=None,
        prompt_tokens=None,
        max_tokens=None,
        temperature=None,
        top_p=None,
        tenant=None,
        external_id=None,
        finish_reason=None,
        error=None,
        sampled=None,
        parent_span_id=None,
    )
    zero = replace(
        nothing,
        tokenised_ns=0,
        prompt_tokens=0,
        max_tokens=0,
        temperature=0.0,
        top_p=0.0,
        tenant="",
        external_id="",
        finish_reason="",
        error="",
        sampled=False,
    )
    origin = wire.Origin(0, nothing.pid, nothing.tid, False)
    assert wire.decode(*wire.encode(nothing), origin) == nothing
    assert wire.decode(*wire.encode(zero), origin) == zero


def test_strings_are_capped_between_characters(make_record: Callable[..., RequestRecord]) -> None:
    record = make_record(
        request_id="é" * 1_000,
        model="m" * 1_000,
        tenant="t" * 1_000,
        error="x" * 65,
        operation="字" * 99,
    )
    back = wire.decode(*wire.encode(record), wire.Origin(0, record.pid, record.tid, False))
    assert isinstance(back, RequestRecord)
    assert back.request_id == "é" * (wire.REQUEST_ID_BYTES // 2)
    assert back.model == "m" * wire.MODEL_BYTES
    assert back.tenant == "t" * wire.TENANT_BYTES
    assert back.error == "x" * wire.LABEL_BYTES
    assert back.operation == "字" * (wire.LABEL_BYTES // 3)
    assert back.request_key == record.request_key


def test_a_lone_surrogate_does_no_harm(make_record: Callable[..., RequestRecord]) -> None:
    back = wire.decode(*wire.encode(make_record(external_id="a\ud800b")), ORIGIN)
    assert isinstance(back, RequestRecord)
    assert back.external_id == "a?b"


@pytest.mark.parametrize(
    "wrong",
    [
        {"end_ns": 0},
        {"step_id": 0},
        {"start_ns": 2**63, "end_ns": 2**64 - 1},
        {"forward_ns": 2**63},
        {"admission": 9},
        {"shares": (Share(0, Phase.DECODE, 1, 0, 0, 1, False),)},
    ],
)
def test_a_step_out_of_bounds_is_malformed(
    make_step: Callable[..., Step], wrong: dict[str, object]
) -> None:
    with pytest.raises(wire.Malformed):
        wire.decode(*wire.encode(replace(make_step(5), **wrong)), ORIGIN)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"sent_ns": 10},
        {"queued_ns": -2},
        {"output_tokens": -1},
        {"temperature": math.inf},
        {"trace_id": 0},
        {"span_id": 0},
        {"request_key": 0},
    ],
)
def test_a_request_out_of_bounds_is_malformed(
    make_record: Callable[..., RequestRecord], wrong: dict[str, object]
) -> None:
    with pytest.raises(wire.Malformed):
        wire.decode(*wire.encode(make_record(**wrong)), ORIGIN)
