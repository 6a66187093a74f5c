"""The vLLM hooks where no vLLM is: over stand-ins of the few names they rely on, old and new.

tests/vllm does the same with the real classes and real servers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsagent.instrumentation import vllm_requests
from dsagent.instrumentation.records import (
    Admission,
    Phase,
    RankStep,
    RequestOpen,
    RequestRecord,
    request_key,
)
from dsagent.instrumentation.ring import RingReader, find_rings
from dsagent.instrumentation.ring_lazy import LazyRing
from dsagent.instrumentation.ring_writer import FAILURES_IN_A_ROW
from dsagent.instrumentation.vllm import install, register
from dsagent.instrumentation.vllm_patch import Hook, Patches
from dsagent.instrumentation.vllm_ranks import RankWatch
from dsagent.instrumentation.vllm_requests import RequestWatch
from dsagent.instrumentation.vllm_steps import STEP_ATTRIBUTE, SchedulerWatch

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01".encode()


class Output(SimpleNamespace):
    """A SchedulerOutput: plain attributes, pickled with whatever was added."""


class Engine:
    """A scheduler that schedules what it is told; the names are those of vLLM."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: deque[Any] = deque()
        self.max_num_running_reqs = 16
        self.max_num_scheduled_tokens = 64
        self.block_size = 16
        pool = SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: 90)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def add(self, request_id: str, prompt: int, computed: int = 0) -> Any:
        request = self.requests[request_id] = SimpleNamespace(
            request_id=request_id,
            num_prompt_tokens=prompt,
            num_computed_tokens=computed,
            num_tokens=prompt,
            status=SimpleNamespace(name="RUNNING"),
        )
        self.running.append(request)
        return request

    def schedule(self, plan: dict[str, int], **more: Any) -> Output:
        for request_id, count in plan.items():
            self.requests[request_id].num_computed_tokens += count
        fields: dict[str, Any] = {
            "num_scheduled_tokens": plan,
            "scheduled_new_reqs": [],
            "finished_req_ids": set(),
        }
        return Output(**(fields | more))

    def update_from_output(self, output: Output, tokens: Any) -> Any:
        outputs = [
            SimpleNamespace(request_id=request_id, new_token_ids=[7] * count)
            for request_id, count in tokens.items()
        ]
        for request_id, count in tokens.items():
            self.requests[request_id].num_tokens += count
        return {0: SimpleNamespace(outputs=outputs)}


class Worker:
    rank = 3

    def execute_model(self, output: Any) -> Any:
        return output.result

    def sample_tokens(self, grammar: Any) -> Any:
        return grammar


@pytest.fixture
def read() -> Iterator[Callable[[LazyRing], list[Any]]]:
    """What a ring holds by now."""
    opened: dict[int, RingReader] = {}

    def records(ring: LazyRing) -> list[Any]:
        writer = ring.get()
        assert writer is not None
        assert writer.inode is not None
        if writer.inode not in opened:
            (found,) = [c for c in find_rings(os.getpid()) if c.inode == writer.inode]
            opened[writer.inode] = RingReader.open(found)
        return list(opened[writer.inode].read(1000))

    yield records
    for reader in opened.values():
        reader.close()


@pytest.fixture
def watch() -> Iterator[SchedulerWatch]:
    watching = SchedulerWatch()
    yield watching
    watching.close()


def hooked(watch: SchedulerWatch, engine: Engine) -> tuple[Callable[..., Any], Callable[..., Any]]:
    schedule = watch.wrap_schedule(Engine.schedule)
    update = watch.wrap_update(Engine.update_from_output)
    return (lambda *a, **k: schedule(engine, *a, **k)), (lambda *a: update(engine, *a))


# --- steps -------------------------------------------------------------------


def test_a_prompt_in_chunks_then_decodes(watch: SchedulerWatch, read: Any) -> None:
    engine = Engine()
    schedule, update = hooked(watch, engine)
    engine.add("a", prompt=100, computed=16)
    new = SimpleNamespace(req_id="a", num_computed_tokens=16)
    update(schedule({"a": 64}, scheduled_new_reqs=[new]), {})
    update(schedule({"a": 20}), {"a": 1})
    update(schedule({"a": 1}), {"a": 1})
    first, second, third = read(watch.ring)
    assert [s.step_id for s in (first, second, third)] == [1, 2, 3]
    assert [s.shares[0].phase for s in (first, second, third)] == [
        Phase.PREFILL, Phase.PREFILL, Phase.DECODE,
    ]  # fmt: skip
    assert [s.shares[0].context_tokens for s in (first, second, third)] == [16, 80, 100]
    assert [s.shares[0].cached_tokens for s in (first, second, third)] == [16, 0, 0]
    assert [s.shares[0].output_tokens for s in (first, second, third)] == [0, 1, 1]
    assert [(s.prefill_tokens, s.decode_tokens) for s in (first, second, third)] == [
        (64, 0), (20, 0), (0, 1),
    ]  # fmt: skip
    assert first.shares[0].request_key == request_key("a")
    assert (first.kv_blocks_used, first.kv_blocks_total, first.running) == (10, 100, 1)
    assert first.engine_id == watch.engine_id
    assert not first.graph


def test_overlapping_steps_are_told_in_order_each_with_its_own_part(
    watch: SchedulerWatch, read: Any
) -> None:
    engine = Engine()
    schedule, update = hooked(watch, engine)
    engine.add("a", prompt=4, computed=4)
    one = schedule({"a": 1})
    two = schedule({"a": 1})  # before the first has come back
    (ring,) = [
        RingReader.open(c) for c in find_rings(os.getpid()) if c.inode == watch.ring.get().inode
    ]  # type: ignore[union-attr]
    assert ring.running()[0] == 1  # the workers are still at the first
    update(one, {"a": 1})
    assert ring.running()[0] == 2
    update(two, {"a": 1})
    assert ring.running()[0] == 0
    ring.close()
    first, second = read(watch.ring)
    assert second.start_ns < first.end_ns
    # The second was executed after the first had been: until then it waited at the workers.
    assert second.forward_start_ns == first.forward_end_ns
    assert second.prepare_ns > 0 == first.prepare_ns
    assert [s.shares[0].context_tokens for s in (first, second)] == [4, 5]


def test_nothing_scheduled_is_no_step(watch: SchedulerWatch, read: Any) -> None:
    engine = Engine()
    schedule, update = hooked(watch, engine)
    empty = schedule({})
    assert not hasattr(empty, STEP_ATTRIBUTE)
    update(empty, {})
    engine.add("a", prompt=4)
    update(schedule({"a": 4}), {"a": 1})
    (step,) = read(watch.ring)
    assert step.step_id == 1


@pytest.mark.parametrize("tells", [True, False], ids=["0.16 tells", "0.8.5 only queues"])
def test_what_is_computed_again_after_a_preemption(
    watch: SchedulerWatch, read: Any, tells: bool
) -> None:
    engine = Engine()
    schedule, update = hooked(watch, engine)
    victim = engine.add("victim", prompt=10)
    engine.add("other", prompt=10, computed=10)
    update(schedule({"victim": 10}), {"victim": 1})
    update(schedule({"victim": 1}), {"victim": 1})  # 11 computed, 12 known
    victim.num_computed_tokens, victim.status.name = 0, "PREEMPTED"
    engine.running.remove(victim)
    engine.waiting.appendleft(victim)
    told = {"preempted_req_ids": {"victim"}} if tells else {}
    update(schedule({"other": 1}, **told), {"other": 1})
    told = {"preempted_req_ids": set()} if tells else {}
    update(schedule({"other": 1}, **told), {"other": 1})  # still in the queue, not preempted again
    engine.waiting.clear()
    victim.status.name = "RUNNING"
    update(schedule({"victim": 8}, **told), {})
    update(schedule({"victim": 4}, **told), {"victim": 1})
    update(schedule({"victim": 1}, **told), {"victim": 1})
    steps = read(watch.ring)
    assert [s.preempted for s in steps] == [0, 0, 1, 0, 0, 0, 0]
    assert steps[2].admission is Admission.NO_KV_BLOCKS
    again = [(s.shares[0].phase, s.shares[0].recompute) for s in steps[4:]]
    assert again == [(Phase.PREFILL, True), (Phase.PREFILL, True), (Phase.DECODE, False)]


def test_speculative_tokens_count_one_by_one(watch: SchedulerWatch, read: Any) -> None:
    engine = Engine()
    schedule, update = hooked(watch, engine)
    engine.add("a", prompt=4, computed=4)
    update(schedule({"a": 5}), {"a": 3})  # of 4 drafts 2 were accepted
    (step,) = read(watch.ring)
    assert (step.shares[0].scheduled_tokens, step.shares[0].output_tokens) == (5, 3)


def test_why_somebody_waits(watch: SchedulerWatch, read: Any) -> None:
    engine = Engine()
    schedule, update = hooked(watch, engine)
    engine.add("a", prompt=500)
    engine.waiting.append(SimpleNamespace(num_tokens=20, status=SimpleNamespace(name="WAITING")))
    update(schedule({"a": 64}), {})  # the whole budget
    engine.max_num_running_reqs = 1
    update(schedule({"a": 8}), {})
    engine.max_num_running_reqs = 16
    engine.waiting[0].num_tokens = 16 * 91
    update(schedule({"a": 8}), {})
    assert [s.admission for s in read(watch.ring)] == [
        Admission.NO_BUDGET, Admission.NO_PLACE, Admission.NO_KV_BLOCKS,
    ]  # fmt: skip


def test_one_object_of_outputs_as_in_0_8(watch: SchedulerWatch, read: Any) -> None:
    engine = Engine()
    engine.add("a", prompt=4)
    update = watch.wrap_update(lambda *a: Engine.update_from_output(*a)[0])
    update(engine, watch.wrap_schedule(Engine.schedule)(engine, {"a": 4}), {"a": 1})
    (step,) = read(watch.ring)
    assert step.shares[0].output_tokens == 1


def test_what_we_get_wrong_is_counted_and_what_vllm_raises_is_its_own(
    watch: SchedulerWatch, read: Any
) -> None:
    schedule = watch.wrap_schedule(lambda _scheduler: None)  # nothing of what we look for
    assert read(watch.ring) == []
    writer = watch.ring.get()
    assert writer is not None
    for _ in range(2 * FAILURES_IN_A_ROW):
        assert schedule(object()) is None
    # It has switched itself off, and looks no more.
    assert watch.ring.failures == writer.failures == FAILURES_IN_A_ROW
    assert watch.ring.get() is None
    (ring,) = [each for each in find_rings(os.getpid()) if each.inode == writer.inode]
    reader = RingReader.open(ring)
    before = reader.health().unwritten
    engine = Engine()
    engine.add("a", prompt=4)
    schedule, update = hooked(watch, engine)
    update(schedule({"a": 4}), {"a": 1})
    update(schedule({}), {})
    assert watch.ring.failures == FAILURES_IN_A_ROW
    assert reader.health().unwritten == before + 1  # the step
    reader.close()

    class VllmError(Exception):
        pass

    def fails(_scheduler: Any) -> None:
        raise VllmError

    with pytest.raises(VllmError):
        watch.wrap_schedule(fails)(engine)


def test_whoever_calls_by_other_names_is_answered_all_the_same(
    watch: SchedulerWatch, requests: RequestWatch
) -> None:
    def answers(_self: Any, *, outputs: int, of: int) -> int:
        return outputs + of

    for wrap in (watch.wrap_update, requests.wrap_outputs, requests.wrap_register):
        assert wrap(answers)(object(), outputs=1, of=2) == 3
    assert (watch.ring.failures, requests.ring.failures) == (1, 2)


# --- ranks -------------------------------------------------------------------


def test_a_rank_tells_of_its_step_and_of_the_one_it_is_at(read: Any) -> None:
    ranks = RankWatch()
    seen = []

    def look(worker: Any, output: Any) -> Any:
        seen.append(ring.running()[0])
        return output.result

    output = Output(result=None)
    setattr(output, STEP_ATTRIBUTE, (99, 7))
    output = pickle.loads(pickle.dumps(output))  # as it comes to the worker
    ranks._engine_id = 99
    ranks.ring.get()
    (ring,) = [
        RingReader.open(c) for c in find_rings(os.getpid()) if c.inode == ranks.ring.get().inode
    ]  # type: ignore[union-attr]
    ranks._engine_id = 0
    sample = ranks.wrap_sample(Worker.sample_tokens)
    inner = ranks.wrap_execute(look)
    outer = ranks.wrap_execute(inner)
    assert outer(Worker(), output) is None
    assert ring.running()[0] == 7  # it has not sampled yet
    assert sample(Worker(), "grammar") == "grammar"
    assert ring.running()[0] == 0
    assert seen == [7]
    (record,) = read(ranks.ring)
    assert isinstance(record, RankStep)
    assert (record.engine_id, record.step_id, record.rank) == (99, 7, 3)
    assert record.end_ns > record.start_ns
    # Without a second call, and with one that never comes.
    setattr(output, STEP_ATTRIBUTE, (99, 8))
    output.result = "tokens"
    assert outer(Worker(), output) == "tokens"
    setattr(output, STEP_ATTRIBUTE, (99, 9))
    output.result = None
    outer(Worker(), output)
    setattr(output, STEP_ATTRIBUTE, (99, 10))
    outer(Worker(), output)
    outer(Worker(), Output(result=None))  # no step: nothing was scheduled
    assert [r.step_id for r in read(ranks.ring)] == [8, 9]
    ring.close()
    ranks.close()


# --- requests ----------------------------------------------------------------


class Processor:
    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any, *_: Any) -> None:
        self.request_states[request.request_id] = request

    def process_outputs(self, outputs: list[Any], timestamp: float | None = None) -> str:
        for output in outputs:
            if output.finish_reason is not None or output.stop_string:
                del self.request_states[output.request_id]
        return "done"

    def abort_requests(self, ids: list[str]) -> list[str]:
        return [one for one in ids if self.request_states.pop(one, None)]


def engine_request(request_id: str, **changes: Any) -> Any:
    sampling = SimpleNamespace(max_tokens=8, temperature=0.5, top_p=1.0)
    fields = {"request_id": request_id, "prompt_token_ids": [1, 2, 3], "sampling_params": sampling}
    return SimpleNamespace(**(fields | changes))


def engine_output(request_id: str, tokens: int, **changes: Any) -> Any:
    fields = {
        "request_id": request_id,
        "new_token_ids": [5] * tokens,
        "finish_reason": None,
        "events": None,
        "stop_string": False,
    }
    return SimpleNamespace(**(fields | changes))


class Happens(SimpleNamespace):
    """An event of the engine core, so long before or after it is looked at."""

    def __init__(self, kind: int, off_s: float) -> None:
        super().__init__(type=kind, off_s=off_s)

    @property
    def timestamp(self) -> float:
        return time.monotonic() + float(self.off_s)


class FrontEnd:
    """An API server in a nutshell: an application that hands requests to the engine."""

    def __init__(self, watch: RequestWatch) -> None:
        self.processor = Processor()
        self.state = SimpleNamespace(args=SimpleNamespace(served_model_name=["tiny"]))
        self.outputs: list[list[Any]] = []
        self.requests: list[Any] = []
        self.fails: type[BaseException] | None = None
        self.status = 200
        self._register = watch.wrap_register(Processor.add_request)
        self._process = watch.wrap_outputs(Processor.process_outputs)
        self._abort = watch.wrap_abort(Processor.abort_requests)
        self._add = watch.wrap_add(FrontEnd.add_request)
        self._app = watch.wrap_app(FrontEnd.application)

    async def add_request(self, request: Any) -> None:
        self._register(self.processor, request)
        await asyncio.sleep(0)

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        for request in self.requests:
            await asyncio.create_task(self._add(self, request))
        await asyncio.sleep(0.002)  # the engine core works
        await send({"type": "http.response.start", "status": self.status})
        for outputs in self.outputs:
            assert self._process(self.processor, outputs, time.monotonic()) == "done"
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        if self.fails is not None:
            self._abort(self.processor, list(self.processor.request_states))
            raise self.fails
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def call(self, path: str = "/v1/completions", **headers: bytes) -> None:
        given = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": given}

        async def send(_message: Any) -> None:
            await asyncio.sleep(0)

        asyncio.run(self._app(self, scope, None, send))


@pytest.fixture
def requests() -> Iterator[RequestWatch]:
    watching = RequestWatch()
    yield watching
    watching.close()


def closed(records: list[Any]) -> list[RequestRecord]:
    return [record for record in records if isinstance(record, RequestRecord)]


def test_a_request_from_its_call_to_its_last_byte(requests: RequestWatch, read: Any) -> None:
    front = FrontEnd(requests)
    internal = "cmpl-abc-0-1f2e3d4c"
    front.requests = [engine_request(internal, external_req_id="cmpl-abc-0")]
    events = [Happens(1, -2e-4), Happens(2, -1e-4)]
    stats = SimpleNamespace(num_cached_tokens=2)
    front.outputs = [
        [engine_output(internal, 1, events=events, prefill_stats=stats)],
        [engine_output("somebody else's", 1)],
        [engine_output(internal, 2, finish_reason="length")],
    ]
    del front.outputs[1]
    front.call(traceparent=TRACEPARENT, x_request_id=b"abc", x_tenant_id=b"blue")
    opened, record = read(requests.ring)
    assert isinstance(opened, RequestOpen)
    assert isinstance(record, RequestRecord)
    for one in (opened, record):
        assert one.request_key == request_key(internal)
        assert one.request_id == "cmpl-abc"  # as the client sees it
        assert (one.trace_id, one.parent_span_id, one.sampled) == (TRACE_ID, SPAN_ID, True)
    assert (record.operation, record.model) == ("text_completion", "tiny")
    assert (record.external_id, record.tenant) == ("abc", "blue")
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 3, 2)
    assert (record.max_tokens, record.temperature, record.top_p) == (8, 0.5, 1.0)
    assert (record.finish_reason, record.error) == ("length", None)
    times = (
        record.received_ns, record.tokenised_ns, record.queued_ns, record.first_scheduled_ns,
        record.first_token_ns, record.first_sent_ns, record.finished_ns,
    )  # fmt: skip
    assert list(times) == sorted(times)  # type: ignore[type-var]
    assert record.sent_ns >= (record.first_sent_ns or 0)


def test_the_tenant_is_in_the_header_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    monkeypatch.setenv("DSAGENT_TENANT_HEADER", "X-Team")
    watching = RequestWatch()
    try:
        front = FrontEnd(watching)
        front.requests = [engine_request("cmpl-abc-0-1f2e3d4c", external_req_id="cmpl-abc-0")]
        front.outputs = [[engine_output("cmpl-abc-0-1f2e3d4c", 1, finish_reason="length")]]
        front.call(x_team=b"blue", x_tenant_id=b"green")
        (record,) = closed(read(watching.ring))
        assert record.tenant == "blue"
    finally:
        watching.close()


def test_a_version_that_tells_nothing_of_the_cache_found_not_nothing_in_it(
    requests: RequestWatch, read: Any
) -> None:
    front = FrontEnd(requests)
    front.requests = [engine_request("a")]
    front.outputs = [[engine_output("a", 1, finish_reason="stop")]]
    front.call()
    (record,) = closed(read(requests.ring))
    assert record.output_tokens == 1 and record.cached_tokens is None


def test_the_engine_may_have_it_before_its_sender_goes_on(
    requests: RequestWatch, read: Any
) -> None:
    front = FrontEnd(requests)
    front.requests = [engine_request("here"), engine_request("on another machine")]
    front.outputs = [
        [
            engine_output(
                "here", 1, finish_reason="stop", events=[Happens(1, -2e-4), Happens(2, -1e-4)]
            ),
            engine_output(
                "on another machine",
                1,
                finish_reason="stop",
                events=[Happens(1, -1e5), Happens(2, 1e5)],
            ),
        ]
    ]
    front.call()
    here, far = closed(read(requests.ring))
    assert here.tokenised_ns <= here.queued_ns < here.first_scheduled_ns
    assert far.first_scheduled_ns is None
    assert far.queued_ns >= far.tokenised_ns


def test_samples_and_prompts_of_one_call_share_its_trace(requests: RequestWatch, read: Any) -> None:
    front = FrontEnd(requests)
    ids = ["0_cmpl-x-0-rand", "1_cmpl-x-0-rand", "cmpl-x-1-rand"]
    shown = ["cmpl-x-0", "cmpl-x-0", "cmpl-x-1"]
    front.requests = [
        engine_request(one, external_req_id=external)
        for one, external in zip(ids, shown, strict=True)
    ]
    front.outputs = [[engine_output(one, 1, finish_reason="stop") for one in ids]]
    front.call(traceparent=TRACEPARENT)
    records = closed(read(requests.ring))
    assert [r.request_id for r in records] == ["0_cmpl-x-0", "1_cmpl-x-0", "cmpl-x-1"]
    assert {r.trace_id for r in records} == {TRACE_ID}
    assert len({r.span_id for r in records}) == 3


def test_a_client_that_leaves_and_a_stop_string(requests: RequestWatch, read: Any) -> None:
    front = FrontEnd(requests)
    front.requests = [engine_request("left"), engine_request("stopped")]
    front.outputs = [[engine_output("left", 1), engine_output("stopped", 1, stop_string=True)]]
    front.fails = asyncio.CancelledError
    with pytest.raises(asyncio.CancelledError):
        front.call()
    by_id = {record.request_id: record for record in closed(read(requests.ring))}
    assert (by_id["left"].finish_reason, by_id["left"].error) == ("abort", "client_disconnect")
    assert by_id["stopped"].finish_reason == "stop"
    assert by_id["left"].output_tokens == 1


def test_a_request_that_is_forgotten_is_counted(
    requests: RequestWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_requests, "_MOST_LIVES", 2)
    for name in ("a", "b", "c"):
        requests._opened(engine_request(name))
    assert requests.ring.failures == 1


def test_calls_that_make_no_request(requests: RequestWatch, read: Any) -> None:
    front = FrontEnd(requests)
    front.call("/tokenize")
    front.status = 400
    front.call("/v1/chat/completions", traceparent=TRACEPARENT)
    front.call("/tokenize")
    (record,) = read(requests.ring)
    assert (record.error, record.operation, record.output_tokens) == ("invalid_request", "chat", 0)
    assert (record.trace_id, record.queued_ns, record.first_sent_ns) == (TRACE_ID, None, None)


def test_a_trace_id_in_x_request_id_is_the_last_resort(requests: RequestWatch, read: Any) -> None:
    front = FrontEnd(requests)
    for number, headers in enumerate(
        (
            {"x_request_id": f"{TRACE_ID:032x}-{SPAN_ID:016x}".encode()},
            {"x_request_id": f"{1:032x}-{2:016x}".encode(), "traceparent": TRACEPARENT},
            {"x_request_id": b"\xff not hex"},
        )
    ):
        front.requests = [engine_request(f"r{number}")]
        front.outputs = [[engine_output(f"r{number}", 1, finish_reason="stop")]]
        front.call(**headers)
    first, second, third = closed(read(requests.ring))
    assert (first.trace_id, first.parent_span_id, first.sampled) == (TRACE_ID, SPAN_ID, None)
    assert (second.trace_id, second.parent_span_id, second.sampled) == (TRACE_ID, SPAN_ID, True)
    assert third.parent_span_id is None


def test_a_pipelined_call_is_a_call_of_its_own(requests: RequestWatch, read: Any) -> None:
    """uvicorn starts it from within the sending of the reply before, in that call's context."""
    front, following = FrontEnd(requests), FrontEnd(requests)
    front.requests, following.requests = [engine_request("one")], [engine_request("two")]
    front.outputs = [[engine_output("one", 1, finish_reason="stop")]]
    following.outputs = [[engine_output("two", 1, finish_reason="stop")]]
    tasks = []

    async def send(message: Any) -> None:
        if message.get("more_body") is False and not tasks:
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
            tasks.append(asyncio.create_task(following._app(following, scope, None, send)))

    async def both() -> None:
        headers = [(b"traceparent", TRACEPARENT)]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        await front._app(front, scope, None, send)
        await tasks[0]

    asyncio.run(both())
    first, second = closed(read(requests.ring))
    assert (first.request_id, first.trace_id) == ("one", TRACE_ID)
    assert second.request_id == "two"
    assert second.trace_id != TRACE_ID


def test_a_call_that_is_closed_in_another_context_ends_as_it_would(
    requests: RequestWatch, read: Any
) -> None:
    async def waits(_client: Any) -> None:
        requests._opened(engine_request("given-up"))
        await asyncio.sleep(3600)

    async def begun() -> Any:
        coroutine = requests.wrap_add(waits)(object())
        coroutine.send(None)
        return coroutine

    # As the garbage collector does it: whatever context it runs in.
    asyncio.run(begun()).close()
    assert requests.ring.failures == 1


def test_without_http_a_request_ends_with_its_last_output(
    requests: RequestWatch, read: Any
) -> None:
    front = FrontEnd(requests)
    request = engine_request("r", trace_headers={"traceparent": TRACEPARENT.decode()})
    asyncio.run(front._add(front, request))
    front._process(front.processor, [engine_output("r", 4, finish_reason="stop")], None)
    (record,) = closed(read(requests.ring))
    assert (record.trace_id, record.output_tokens, record.finish_reason) == (TRACE_ID, 4, "stop")


# --- patching ----------------------------------------------------------------

MODULE = """
class Thing:
    def method(self, number):
        return number

    @property
    def other(self):
        return 1
"""


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, number: int) -> Any:
        return 2 * original(self, number)

    return method


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "hookable.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "hookable"
    sys.modules.pop("hookable", None)


@pytest.mark.parametrize("loaded", [True, False])
def test_a_method_is_replaced_and_put_back(module: str, loaded: bool) -> None:
    if loaded:
        __import__(module)
    finders = list(sys.meta_path)
    patches = Patches(
        [Hook(module, "Thing", "method", doubled), Hook(module, "Thing", "no", doubled)]
    )
    patches.install()
    hookable = __import__(module)
    assert hookable.Thing().method(4) == 8
    assert patches.installed == ["hookable.Thing.method"]
    assert patches.missing == ["hookable.Thing.no"]
    assert "exec_module" not in vars(hookable.__spec__.loader)
    stand_in = hookable.Thing.__dict__["method"]
    patches.remove()
    assert hookable.Thing.__dict__["method"] is stand_in.__wrapped__
    assert hookable.Thing().method(4) == 4
    assert sys.meta_path == finders


@pytest.mark.parametrize("loaded", [True, False])
def test_a_hook_that_fails_does_not_fail_the_import(module: str, loaded: bool) -> None:
    def fails(_original: Callable[..., Any]) -> Callable[..., Any]:
        raise KeyError("torch")

    if loaded:
        __import__(module)
    patches = Patches([Hook(module, "Thing", "method", fails)])
    patches.install()
    assert __import__(module).Thing().method(4) == 4
    patches.remove()
    assert (patches.installed, patches.missing) == ([], ["hookable.Thing.method"])


def test_what_is_loaded_after_the_removal_is_left_alone(module: str) -> None:
    patches = Patches([Hook(module, "Thing", "method", doubled)])
    patches.install()
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.loader is not None
    hookable = importlib.util.module_from_spec(spec)
    patches.remove()
    spec.loader.exec_module(hookable)
    assert hookable.Thing().method(4) == 4


def test_who_wrapped_ours_keeps_his(module: str) -> None:
    hookable = __import__(module)
    patches = Patches([Hook(module, "Thing", "method", doubled)])
    patches.install()
    theirs = doubled(hookable.Thing.method)
    hookable.Thing.method = theirs
    patches.remove()
    assert hookable.Thing.__dict__["method"] is theirs


def test_the_plug_in_is_installed_once_whoever_asks() -> None:
    register()
    register("whatever a later version hands over")
    installed = install()
    assert install() is installed
    assert installed.failures == 0
    installed.remove()
    again = install()
    assert again is not installed
    again.remove()
