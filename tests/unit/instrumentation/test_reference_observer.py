"""The bundled engine's observer: two rings, complete records, no failure into the engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dsagent.engine.observe import NO_PLACE, RequestLife, StepReport, StepShare
from dsagent.instrumentation.records import (
    Admission,
    Phase,
    RequestOpen,
    RequestRecord,
    Share,
    Step,
    request_key,
)
from dsagent.instrumentation.reference import ReferenceObserver
from dsagent.instrumentation.ring import RingReader, Role, find_rings
from dsagent.instrumentation.ring_writer import FAILURES_IN_A_ROW

ENGINE_ID = 4711
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def observer() -> Iterator[ReferenceObserver]:
    watching = ReferenceObserver(engine_id=ENGINE_ID, capacity_bytes=128 << 10)
    yield watching
    watching.close()


@pytest.fixture
def rings() -> Iterator[Callable[[], dict[Role, RingReader]]]:
    """The open rings of our observer, by role."""
    opened: list[RingReader] = []

    def find() -> dict[Role, RingReader]:
        readers = [RingReader.open(candidate) for candidate in find_rings(os.getpid())]
        opened.extend(readers)
        return {r.header.role: r for r in readers if r.header.engine_id == ENGINE_ID}

    yield find
    for reader in opened:
        reader.close()


def life(**changes: Any) -> RequestLife:
    fields: dict[str, Any] = {
        "request_id": "cmpl-1",
        "operation": "chat",
        "model": "smollm2",
        "received_ns": 1_000,
        "traceparent": TRACEPARENT,
    }
    return RequestLife(**(fields | changes))


def report(step_id: int = 1) -> StepReport:
    return StepReport(
        step_id=step_id,
        start_ns=1_000,
        end_ns=2_000,
        schedule_ns=10,
        prepare_ns=20,
        forward_ns=900,
        sample_ns=30,
        output_ns=40,
        prefill_tokens=64,
        decode_tokens=1,
        waiting=3,
        running=2,
        preempted=1,
        kv_blocks_used=7,
        kv_blocks_total=100,
        admission=NO_PLACE,
        graph=True,
        shares=[
            StepShare("a", True, 64, 16, 16, 0, False),
            StepShare("b", False, 1, 0, 40, 1, True),
        ],
    )


def in_thread(work: Callable[[], object]) -> int:
    """Run it in a thread of its own; that thread's id."""
    ids: list[int] = []

    def run() -> None:
        ids.append(threading.get_native_id())
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return ids[0]


def test_each_thread_gets_its_ring_when_it_first_writes(
    observer: ReferenceObserver, rings: Callable[[], dict[Role, RingReader]]
) -> None:
    assert rings() == {}
    loop_tid = in_thread(observer.idle)
    assert set(rings()) == {Role.SCHEDULER}
    observer.request_opened(life())
    both = rings()
    assert both[Role.SCHEDULER].header.tid == loop_tid
    assert both[Role.FRONTEND].header.tid == threading.get_native_id()
    assert {reader.header.pid for reader in both.values()} == {os.getpid()}
    assert not both[Role.FRONTEND].header.exports_spans


def test_a_step_is_told_as_the_engine_reported_it(
    observer: ReferenceObserver, rings: Callable[[], dict[Role, RingReader]]
) -> None:
    observer.step_started(1, 1_000)
    reader = rings()[Role.SCHEDULER]
    assert reader.running() == (1, 1_000, 1_000)
    observer.step_finished(report())
    assert reader.running() == (1, 1_000, 2_000)
    (step,) = reader.read()
    assert step == Step(
        engine_id=ENGINE_ID,
        step_id=1,
        pid=os.getpid(),
        tid=threading.get_native_id(),
        start_ns=1_000,
        end_ns=2_000,
        schedule_ns=10,
        prepare_ns=20,
        forward_ns=900,
        sample_ns=30,
        output_ns=40,
        prefill_tokens=64,
        decode_tokens=1,
        waiting=3,
        running=2,
        preempted=1,
        kv_blocks_used=7,
        kv_blocks_total=100,
        admission=Admission.NO_PLACE,
        graph=True,
        shares=(
            Share(request_key("a"), Phase.PREFILL, 64, 16, 16, 0, False),
            Share(request_key("b"), Phase.DECODE, 1, 0, 40, 1, True),
        ),
    )
    before_ns = time.monotonic_ns()
    observer.idle()
    step_id, start_ns, heartbeat_ns = reader.running()
    assert (step_id, start_ns) == (0, 0)
    assert before_ns <= heartbeat_ns <= time.monotonic_ns()


def test_the_closing_record_is_complete_and_has_the_ids_of_the_opening(
    observer: ReferenceObserver, rings: Callable[[], dict[Role, RingReader]]
) -> None:
    request = life(external_id="x-1", tenant="t")
    observer.request_opened(request)
    request.tokenised_ns, request.queued_ns, request.first_scheduled_ns = 1_100, 1_200, 1_300
    request.first_token_ns, request.first_sent_ns = 1_400, 1_500
    request.finished_ns, request.sent_ns = 1_600, 1_700
    request.prompt_tokens, request.output_tokens, request.cached_tokens = 9, 4, 0
    request.max_tokens, request.temperature, request.finish_reason = 4, 0.0, "length"
    observer.request_closed(request)
    opened, closed = rings()[Role.FRONTEND].read()
    assert isinstance(opened, RequestOpen)
    assert opened.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert opened.parent_span_id == 0xB7AD6B7169203331
    assert opened.sampled is True
    assert closed == RequestRecord(
        request_key=request_key("cmpl-1"),
        request_id="cmpl-1",
        trace_id=opened.trace_id,
        span_id=opened.span_id,
        parent_span_id=opened.parent_span_id,
        sampled=True,
        operation="chat",
        model="smollm2",
        tenant="t",
        external_id="x-1",
        pid=os.getpid(),
        tid=threading.get_native_id(),
        received_ns=1_000,
        tokenised_ns=1_100,
        queued_ns=1_200,
        first_scheduled_ns=1_300,
        first_token_ns=1_400,
        first_sent_ns=1_500,
        finished_ns=1_600,
        sent_ns=1_700,
        prompt_tokens=9,
        output_tokens=4,
        cached_tokens=0,
        max_tokens=4,
        temperature=0.0,
        top_p=None,
        finish_reason="length",
        error=None,
    )
    assert observer._contexts == {}


def test_without_context_a_random_trace_and_no_flag(
    observer: ReferenceObserver, rings: Callable[[], dict[Role, RingReader]]
) -> None:
    for number in range(2):
        request = life(request_id=f"r{number}", traceparent="00-nonsense")
        observer.request_opened(request)
        observer.request_closed(request)
    first_open, first_close, second_open, _ = rings()[Role.FRONTEND].read()
    assert isinstance(first_open, RequestOpen)
    assert isinstance(first_close, RequestRecord)
    assert isinstance(second_open, RequestOpen)
    assert (first_open.sampled, first_open.parent_span_id) == (None, None)
    assert (first_close.trace_id, first_close.span_id) == (first_open.trace_id, first_open.span_id)
    assert first_open.trace_id != second_open.trace_id


def test_a_request_that_was_never_opened_still_closes(
    observer: ReferenceObserver, rings: Callable[[], dict[Role, RingReader]]
) -> None:
    before_ns = time.monotonic_ns()
    observer.request_closed(life(error="invalid_request"))
    observer.request_closed(life(request_id="r2", finished_ns=5_000))
    refused, ended = rings()[Role.FRONTEND].read()
    assert isinstance(refused, RequestRecord)
    assert isinstance(ended, RequestRecord)
    assert before_ns <= refused.sent_ns <= time.monotonic_ns()
    assert refused.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert ended.sent_ns == 5_000


def test_nothing_is_raised_into_the_engine_and_it_is_counted(
    observer: ReferenceObserver, rings: Callable[[], dict[Role, RingReader]]
) -> None:
    observer.request_opened(life())
    observer.idle()
    observer.request_opened(None)  # type: ignore[arg-type]
    observer.request_closed(object())  # type: ignore[arg-type]
    observer.step_finished(None)  # type: ignore[arg-type]
    observer.step_started("x", None)  # type: ignore[arg-type]
    found = rings()
    assert found[Role.FRONTEND].health().failures == 2
    assert found[Role.SCHEDULER].health().failures == 2
    observer.step_finished(report())
    assert len(found[Role.SCHEDULER].read()) == 1


def test_what_comes_after_it_has_switched_itself_off_is_counted(
    observer: ReferenceObserver, rings: Callable[[], dict[Role, RingReader]]
) -> None:
    observer.request_opened(life())
    observer.idle()
    for _ in range(FAILURES_IN_A_ROW):
        observer.request_closed(object())  # type: ignore[arg-type]
        observer.step_finished(None)  # type: ignore[arg-type]
    found = rings()
    before = {role: found[role].health().unwritten for role in found}
    observer.request_opened(life(request_id="r2"))
    observer.request_closed(life(request_id="r2"))
    observer.step_started(7, 1)
    observer.step_finished(report())
    observer.idle()
    after = {role: found[role].health().unwritten for role in found}
    assert after[Role.FRONTEND] == before[Role.FRONTEND] + 2
    assert after[Role.SCHEDULER] == before[Role.SCHEDULER] + 1
    assert len(found[Role.FRONTEND].read()) == 1


def test_no_memory_file_no_ring_no_harm(
    observer: ReferenceObserver,
    rings: Callable[[], dict[Role, RingReader]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    for step_id in range(1, 10):
        observer.step_started(step_id, 1)
        observer.step_finished(report(step_id))
    assert len(caplog.records) == 3  # it tries a few times, then gives up
    monkeypatch.undo()
    observer.idle()
    assert Role.SCHEDULER not in rings()


class Collecting:
    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self.records: list[RequestRecord] = []
        self.stopped = False

    def offer_step(self, head: Any, shares: Any, tid: int) -> None:
        self.steps.append((head, shares, tid))

    def offer_request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def stop(self, deadline_s: float) -> None:
        self.stopped = True


def test_one_that_exports_says_so_and_hands_on_copies(
    rings: Callable[[], dict[Role, RingReader]],
) -> None:
    exporter = Collecting()
    observer = ReferenceObserver(engine_id=ENGINE_ID, exporter=exporter)
    step = report()
    observer.step_finished(step)
    observer.request_closed(life())
    assert isinstance(step.shares, list)
    step.shares.clear()
    ((head, shares, tid),) = exporter.steps
    assert (head[0], len(shares), tid) == (1, 2, threading.get_native_id())
    assert exporter.records[0].self_exported
    found = rings()
    assert all(reader.header.exports_spans for reader in found.values())
    assert found[Role.FRONTEND].read() == exporter.records
    observer.close()
    assert exporter.stopped
