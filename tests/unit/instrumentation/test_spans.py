"""Records become spans: right names, right parents, links both ways, absent is not zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dsagent.instrumentation import names
from dsagent.instrumentation.records import Phase, RequestRecord, Share, Step
from dsagent.instrumentation.spans import (
    request_link,
    request_spans,
    step_span,
    step_span_id,
    step_trace_id,
)

MakeStep = Callable[..., Step]
MakeRecord = Callable[..., RequestRecord]


def share(key: int, phase: Phase = Phase.DECODE, *, recompute: bool = False) -> Share:
    return Share(key, phase, 1, 0, 10, 1, recompute)


@pytest.fixture
def served(make_step: MakeStep) -> list[Step]:
    """Two prefill chunks, then decodes; step 9 the slowest; step 3 served others only."""
    steps = []
    for step_id in (1, 2, *range(3, 24)):
        phase = Phase.PREFILL if step_id < 3 else Phase.DECODE
        key = 5 if step_id == 3 else 77
        step = replace(make_step(step_id), shares=(share(5), share(key, phase)))
        if step_id == 9:
            step = replace(step, end_ns=step.end_ns + 5_000)
        steps.append(step)
    return steps


def test_a_requests_span_has_the_names_of_the_conventions(make_record: MakeRecord) -> None:
    record = make_record(temperature=0.0, cached_tokens=0, top_p=None, external_id="x-1")
    (root, *_) = request_spans(record, [], parts={"queue.wait": 7, "decode.compute": 0})
    assert (root.name, root.kind) == ("chat smollm2", "SERVER")
    assert (root.trace_id, root.span_id) == (record.trace_id, record.span_id)
    assert root.parent_span_id == record.parent_span_id
    assert (root.start_ns, root.end_ns) == (1_000, 9_000)
    assert root.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "reference",
        "gen_ai.request.model": "smollm2",
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.id": "cmpl-1",
        "gen_ai.response.model": "smollm2",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "dsagent.request.id": "cmpl-1",
        "dsagent.request.external_id": "x-1",
        "dsagent.request.ttft_ns": 3_100,
        "dsagent.request.steps": 0,
        "dsagent.part.queue.wait_ns": 7,
        "dsagent.part.decode.compute_ns": 0,
    }
    assert root.error is None


def test_what_is_below_a_request(make_record: MakeRecord, served: list[Step]) -> None:
    root, *below = request_spans(make_record(), served, parts=None)
    assert [span.name for span in below] == ["queue", "prefill", "prefill", "decode"] + [
        "decode step"
    ] * 10
    queue, first, second, decode, *steps = below
    assert {span.parent_span_id for span in (queue, first, second, decode)} == {root.span_id}
    assert {span.parent_span_id for span in steps} == {decode.span_id}
    assert (queue.start_ns, queue.end_ns) == (1_200, 2_000)
    assert (decode.start_ns, decode.end_ns) == (4_000, 8_900)
    assert [span.attributes[names.STEP_ID] for span in (first, second)] == [1, 2]
    ids = [span.attributes[names.STEP_ID] for span in steps]
    assert ids == sorted(ids, key=lambda value: int(str(value)))
    assert 9 in ids  # the slowest
    assert 3 not in ids  # it did not take part
    spans = [root, *below]
    assert len({span.span_id for span in spans}) == len(spans)
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert root.attributes[names.REQUEST_STEPS] == 22


def test_all_steps_when_asked_for(make_record: MakeRecord, served: list[Step]) -> None:
    spans = request_spans(make_record(), served, parts=None, step_spans="all")
    assert [span.name for span in spans].count("decode step") == 20


def test_steps_and_requests_link_to_each_other(make_record: MakeRecord, served: list[Step]) -> None:
    record = make_record()
    step = served[0]
    of_step = step_span(step, [request_link(record, step.shares[1])])
    prefill = request_spans(record, served, parts=None)[2]
    assert of_step.parent_span_id is None
    (back,) = prefill.links
    assert (back.trace_id, back.span_id) == (of_step.trace_id, of_step.span_id)
    (there,) = of_step.links
    assert (there.trace_id, there.span_id) == (record.trace_id, record.span_id)
    assert there.attributes[names.SHARE_PHASE] == "prefill"
    assert of_step.attributes[names.STEP_SHARES] == 2


def test_a_steps_ids_follow_from_its_engine_and_number() -> None:
    assert step_trace_id(1, 2) == step_trace_id(1, 2)
    assert len({step_trace_id(1, 2), step_trace_id(2, 1), step_trace_id(1, 3)}) == 3
    assert len({step_trace_id(1, 12), step_trace_id(11, 2)}) == 2
    assert 0 < step_trace_id(1, 2) < 2**128
    assert 0 < step_span_id(1, 2) < 2**64


@pytest.mark.parametrize(
    ("prefill", "decode", "phase"), [(5, 0, "prefill"), (0, 5, "decode"), (5, 5, "mixed")]
)
def test_a_steps_phase(make_step: MakeStep, prefill: int, decode: int, phase: str) -> None:
    step = make_step(1, prefill_tokens=prefill, decode_tokens=decode)
    assert step_span(step, ()).attributes[names.STEP_PHASE] == phase


def test_one_that_never_ran_has_neither_queue_nor_decode(make_record: MakeRecord) -> None:
    refused = make_record(
        queued_ns=None,
        first_scheduled_ns=None,
        first_token_ns=None,
        first_sent_ns=None,
        finished_ns=None,
        prompt_tokens=None,
        output_tokens=0,
        finish_reason=None,
        error="invalid_request",
    )
    (root,) = request_spans(refused, [], parts=None)
    assert root.error == "invalid_request"
    assert root.attributes[names.ERROR_TYPE] == "invalid_request"
    assert root.attributes[names.USAGE_OUTPUT_TOKENS] == 0
    for absent in (names.USAGE_INPUT_TOKENS, names.RESPONSE_FINISH_REASONS, names.REQUEST_TTFT_NS):
        assert absent not in root.attributes


def test_an_abort_is_an_error(make_record: MakeRecord) -> None:
    root = request_spans(make_record(finish_reason="abort"), [], parts=None)[0]
    assert root.error == "abort"
    assert root.attributes[names.ERROR_TYPE] == "abort"


def test_one_token_makes_no_decode(make_record: MakeRecord, served: list[Step]) -> None:
    record = make_record(output_tokens=1, finished_ns=4_000)
    spans = request_spans(record, served[:2], parts=None)
    assert [span.name for span in spans][1:] == ["queue", "prefill", "prefill"]


def test_beside_an_engine_that_exports_itself(make_record: MakeRecord, served: list[Step]) -> None:
    """Then ours is an internal span under the engine's own, and nothing has that one's id."""
    record = make_record(self_exported=True)
    root, *below = request_spans(record, served, parts={"queue.wait": 1})
    assert (root.name, root.kind) == ("dsagent.account", "INTERNAL")
    assert root.parent_span_id == record.span_id
    own = request_spans(make_record(), served, parts=None)
    assert not {span.span_id for span in (root, *below)} & {span.span_id for span in own}
    # Steps still point at the SERVER span.
    assert request_link(record, served[0].shares[0]).span_id == record.span_id


def test_no_name_is_spelled_twice() -> None:
    spelled = [
        value
        for key, value in vars(names).items()
        if key.isupper() and not key.startswith("_") and isinstance(value, str)
    ]
    assert len(spelled) == len(set(spelled))
