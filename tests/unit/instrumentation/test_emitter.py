"""The thread that makes spans in the engine's process: bounded, counted, not to be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dsagent.instrumentation import names
from dsagent.instrumentation.emitter import SpanEmitter
from dsagent.instrumentation.records import RequestRecord, request_key
from dsagent.instrumentation.rows import StepHead
from dsagent.instrumentation.spans import Span

MakeRecord = Callable[..., RequestRecord]


def head(step_id: int) -> StepHead:
    return (step_id, 1_000, 2_000, 1, 2, 3, 4, 5, 0, 1, 0, 1, 0, 10, 100, 0, False)


class Kept:
    """A pipeline that keeps what it gets; `gate` holds it up."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = 0
        self.stopped = False

    def keeps(self, record: RequestRecord) -> bool:
        return record.sampled is not False

    def emit(self, spans: Sequence[Span]) -> None:
        self.gate.wait()
        if self.broken:
            self.broken -= 1
            raise RuntimeError("no")
        self.spans += spans

    def stop(self, deadline_s: float) -> None:
        self.stopped = True


def test_the_request_that_closes_before_its_last_step_gets_it_all_the_same(
    make_record: MakeRecord,
) -> None:
    pipeline = Kept()
    emitter = SpanEmitter(pipeline, engine_id=1)
    row: Any = ("cmpl-1", False, 1, 0, 10, 1, False)
    emitter.offer_request(make_record(request_key=request_key("cmpl-1"), self_exported=True))
    emitter.offer_step(head(1), (row,), 1)
    emitter.stop(10)
    assert [span.name for span in pipeline.spans] == [
        "chat smollm2",
        "queue",
        "decode",
        "decode step",
        names.STEP_SPAN,
    ]
    # In this process the request's span is the SERVER span itself.
    assert pipeline.spans[0].kind == "SERVER"
    assert pipeline.stopped


def test_what_is_not_kept_is_not_emitted(make_record: MakeRecord) -> None:
    pipeline = Kept()
    emitter = SpanEmitter(pipeline, engine_id=1)
    row: Any = ("cmpl-1", False, 1, 0, 10, 1, False)
    emitter.offer_step(head(1), (row,), 1)
    emitter.offer_request(make_record(request_key=request_key("cmpl-1"), sampled=False))
    emitter.stop(10)
    assert pipeline.spans == []


def test_a_full_queue_drops_and_counts(make_record: MakeRecord) -> None:
    pipeline = Kept()
    pipeline.gate.clear()  # the thread hangs with the first step
    emitter = SpanEmitter(pipeline, engine_id=1, max_queued=10)
    offered = 0
    while emitter.counts().dropped < 5:
        emitter.offer_request(make_record(request_key=offered + 1))
        offered += 1
    pipeline.gate.set()
    emitter.stop(10)
    assert sum(span.kind == "SERVER" for span in pipeline.spans) == offered - 5


def test_a_failure_is_counted_and_the_thread_goes_on(
    make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = Kept()
    pipeline.broken = 2
    emitter = SpanEmitter(pipeline, engine_id=1)
    for number in range(5):
        emitter.offer_request(make_record(request_key=number + 1))
    emitter.stop(10)
    assert emitter.counts().errors == 2
    assert sum(span.kind == "SERVER" for span in pipeline.spans) == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_stopping_does_not_wait_for_a_pipeline_that_hangs(make_record: MakeRecord) -> None:
    pipeline = Kept()
    pipeline.gate.clear()
    emitter = SpanEmitter(pipeline, engine_id=1)
    emitter.offer_request(make_record())
    emitter.stop(0.1)
    assert pipeline.stopped
    assert pipeline.spans == []
    pipeline.gate.set()
