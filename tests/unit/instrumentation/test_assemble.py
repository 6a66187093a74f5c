"""Steps wait for their requests; what is given up is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dsagent.instrumentation import names
from dsagent.instrumentation.assemble import SpanAssembler
from dsagent.instrumentation.records import Phase, RequestRecord, Share, Step
from dsagent.instrumentation.spans import Span

MakeStep = Callable[..., Step]
MakeRecord = Callable[..., RequestRecord]


def serving(step: Step, *keys: int) -> Step:
    return replace(step, shares=tuple(Share(key, Phase.DECODE, 1, 0, 9, 1, False) for key in keys))


def step_spans(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.name == names.STEP_SPAN]


def test_a_step_comes_out_with_its_last_request(
    make_step: MakeStep, make_record: MakeRecord
) -> None:
    assembler = SpanAssembler()
    first, second = make_record(request_key=1), make_record(request_key=2, span_id=22)
    assert assembler.add_step(serving(make_step(1), 1, 2)) == []
    assert assembler.add_step(serving(make_step(2), 2)) == []
    spans = assembler.end_request(first, kept=True)
    assert spans[0].span_id == first.span_id
    assert step_spans(spans) == []
    spans = assembler.end_request(second, kept=True)
    one, two = step_spans(spans)
    assert [link.span_id for link in one.links] == [first.span_id, second.span_id]
    assert [link.span_id for link in two.links] == [second.span_id]
    assert assembler.flush() == []


def test_links_go_to_kept_requests_only(make_step: MakeStep, make_record: MakeRecord) -> None:
    assembler = SpanAssembler()
    kept, left_out = make_record(request_key=1), make_record(request_key=2, span_id=22)
    assembler.add_step(serving(make_step(1), 1, 2))
    assembler.add_step(serving(make_step(2), 2))
    assembler.end_request(kept, kept=True)
    (both,) = assembler.end_request(left_out, kept=False)
    assert [link.span_id for link in both.links] == [kept.span_id]


def test_a_step_that_comes_after_its_requests_end(
    make_step: MakeStep, make_record: MakeRecord
) -> None:
    assembler = SpanAssembler()
    assembler.end_request(make_record(request_key=1), kept=True)
    (span,) = assembler.add_step(serving(make_step(1), 1))
    assert len(span.links) == 1
    assert assembler.add_step(serving(make_step(2))) == []  # it served nobody


def test_more_steps_than_it_may_hold_are_let_go_and_counted(
    make_step: MakeStep, make_record: MakeRecord
) -> None:
    assembler = SpanAssembler(max_steps=10)
    ended, open_ = make_record(request_key=1), make_record(request_key=2, span_id=22)
    for step_id in range(1, 11):
        assert assembler.add_step(serving(make_step(step_id), 1, 2)) == []
    assembler.end_request(ended, kept=True)
    for step_id in range(11, 16):
        (early,) = assembler.add_step(serving(make_step(step_id), 2))
        assert [link.span_id for link in early.links] == [ended.span_id]
    assert assembler.given_up == 5
    spans = assembler.end_request(open_, kept=True)
    assert len(step_spans(spans)) == 10
    assert assembler._steps_of == {}


def test_flush_gives_what_there_is(make_step: MakeStep, make_record: MakeRecord) -> None:
    assembler = SpanAssembler()
    assembler.add_step(serving(make_step(1), 1, 2))
    assembler.add_step(serving(make_step(2), 2))
    assembler.end_request(make_record(request_key=1), kept=True)
    (span,) = assembler.flush()
    assert len(span.links) == 1
    assert assembler._held == {}
