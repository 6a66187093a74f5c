from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsagent.engine.config import EngineConfig
from dsagent.engine.loader import LoadedModel
from dsagent.engine.loop import Engine
from dsagent.engine.observe import StepObserver
from dsagent.engine.request import EngineStopped, RequestRefused, SamplingParams, TokenOutput

from .conftest import NewEngine, Watcher

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def test_tokens_come_one_a_step_and_the_reason_last(new_engine: NewEngine) -> None:
    engine, watcher = new_engine()
    engine.submit("a", [1, 2, 3], GREEDY)
    finish(engine)
    outputs = watcher.outputs["a"]
    assert [len(output.token_ids) for output in outputs] == [1] * 8
    assert [output.finish_reason for output in outputs] == [None] * 7 + ["length"]
    assert outputs[0].first_scheduled_ns == watcher.steps[0].start_ns
    assert engine.stats()[:2] == (0, 0) and engine.stats().kv_blocks_used == 0


def test_a_step_reports_its_phases_and_shares(new_engine: NewEngine) -> None:
    engine, watcher = new_engine(max_num_batched_tokens=20)
    engine.submit("a", list(range(10)), GREEDY)
    engine.step()
    engine.submit("b", list(range(30)), GREEDY)
    finish(engine)
    assert watcher.started == [(step.step_id, step.start_ns) for step in watcher.steps]
    assert [step.step_id for step in watcher.steps] == list(range(1, len(watcher.steps) + 1))
    for step in watcher.steps:
        phases = (
            step.schedule_ns,
            step.prepare_ns,
            step.forward_ns,
            step.sample_ns,
            step.output_ns,
        )
        assert min(phases) > 0
        assert step.start_ns + sum(phases) == step.end_ns
        assert step.prefill_tokens == sum(s.scheduled_tokens for s in step.shares if s.is_prefill)
        assert step.decode_tokens == sum(not share.is_prefill for share in step.shares)
    second, third = watcher.steps[1:3]
    assert [tuple(share) for share in second.shares] == [
        ("a", False, 1, 0, 10, 1, False),
        ("b", True, 19, 0, 0, 0, False),
    ]
    assert [tuple(share) for share in third.shares] == [
        ("a", False, 1, 0, 11, 1, False),
        ("b", True, 11, 0, 19, 1, False),
    ]
    assert (second.running, second.waiting, second.preempted) == (2, 0, 0)
    for output, step in zip(watcher.outputs["a"], watcher.steps, strict=False):
        assert step.start_ns < output.output_ns <= step.end_ns


def test_an_abort_frees_everything_before_the_next_step(new_engine: NewEngine) -> None:
    engine, watcher = new_engine(max_num_seqs=1)
    engine.submit("running", [1] * 40, LONG)
    engine.submit("waiting", [2] * 40, LONG)
    engine.step()
    assert engine.stats().kv_blocks_used == 3
    engine.abort("running")
    engine.abort("waiting")
    engine.abort("unknown")
    assert engine.step() is False
    assert engine.stats()[:2] == (0, 0) and engine.stats().kv_blocks_used == 0
    assert watcher.reason("running") == watcher.reason("waiting") == "abort"
    engine.submit("running", [1] * 40, GREEDY)  # the id is free again
    finish(engine)


def test_the_end_of_sequence_stops_unless_ignored(tiny: LoadedModel) -> None:
    for ignore_eos, reason in ((False, "stop"), (True, "length")):
        watcher = Watcher()
        everything = LoadedModel("t", tiny.model, tiny.tokenizer, frozenset(range(258)))
        engine = Engine(everything, EngineConfig(), observer=watcher, on_outputs=watcher.take)
        engine.submit("a", [1], SamplingParams(max_tokens=3, ignore_eos=ignore_eos))
        finish(engine)
        assert watcher.reason("a") == reason
        assert len(watcher.tokens("a")) == (3 if ignore_eos else 1)


def test_the_context_ends_a_request_that_would_outgrow_it(new_engine: NewEngine) -> None:
    engine, watcher = new_engine(max_model_len=32)
    engine.submit("a", [1] * 30, LONG)
    finish(engine)
    assert (watcher.reason("a"), len(watcher.tokens("a"))) == ("length", 2)


@pytest.mark.parametrize("prompt", [[], [1] * 32, [-1], [258]])
def test_what_can_never_run_is_refused(new_engine: NewEngine, prompt: list[int]) -> None:
    engine, _ = new_engine(max_model_len=32)
    with pytest.raises(RequestRefused):
        engine.submit("a", prompt, GREEDY)


def test_an_open_id_is_refused(new_engine: NewEngine) -> None:
    engine, _ = new_engine()
    engine.submit("a", [1], GREEDY)
    with pytest.raises(RequestRefused, match="already open"):
        engine.submit("a", [1], GREEDY)


def test_a_small_cache_bounds_the_context(new_engine: NewEngine) -> None:
    engine, watcher = new_engine(num_kv_blocks=4)
    assert engine.max_model_len == 64
    for name in ("a", "b", "c"):
        engine.submit(name, [ord(name)] * 10, LONG)
    finish(engine)
    assert {len(watcher.tokens(name)) for name in ("a", "b", "c")} == {54}
    assert sum(step.preempted for step in watcher.steps) > 0


def test_a_failing_step_ends_its_requests_and_not_the_loop(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, watcher = new_engine()
    engine.submit("a", [1, 2, 3], GREEDY)
    engine.step()

    def forward(batch: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as broken:
        broken.setattr(engine._model, "forward", forward)
        engine.step()
    assert (watcher.reason("a"), watcher.outputs["a"][-1].error) == ("error", "out of luck")
    assert watcher.steps[-1].shares[0].output_tokens == 0
    assert engine.stats().kv_blocks_used == 0
    engine.submit("b", [1, 2, 3], GREEDY)
    finish(engine)
    assert watcher.reason("b") == "length"


class Thread:
    """An engine whose loop runs in its own thread."""

    def __init__(self, loaded: LoadedModel, on_step: Callable[[], object] = lambda: None) -> None:
        self.watcher = Watcher()
        self.ended: dict[str, threading.Event] = {}
        self.begun = threading.Event()
        self.on_step = on_step
        self.engine = Engine(
            loaded, EngineConfig(), observer=self.watcher, on_outputs=self.on_outputs
        )
        self.engine.start()

    def submit(self, name: str, sampling: SamplingParams) -> None:
        self.ended[name] = threading.Event()
        self.engine.submit(name, [1, 2, 3], sampling)

    def on_outputs(self, outputs: list[TokenOutput]) -> None:
        self.watcher.take(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self.ended[output.request_id].set()
        self.begun.set()
        self.on_step()


def test_the_thread_serves_waits_and_drains(tiny: LoadedModel) -> None:
    it = Thread(tiny)
    assert it.engine.healthy
    it.submit("a", GREEDY)
    assert it.ended["a"].wait(30)
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    assert "engine-loop" in threads
    it.submit("b", GREEDY)
    it.engine.stop(drain=True, deadline_s=30)
    assert it.watcher.reason("b") == "length"
    assert not it.engine.healthy
    assert it.watcher.idles >= 1
    with pytest.raises(EngineStopped):
        it.engine.submit("c", [1], GREEDY)


def test_stopping_at_once_aborts(tiny: LoadedModel) -> None:
    it = Thread(tiny)
    it.submit("a", LONG)
    assert it.begun.wait(30)
    it.engine.stop(drain=False, deadline_s=30)
    assert it.watcher.reason("a") == "abort"


def test_draining_past_the_deadline_aborts(tiny: LoadedModel) -> None:
    held = threading.Event()
    it = Thread(tiny, on_step=lambda: held.wait(0.01))
    it.submit("a", LONG)
    assert it.begun.wait(30)
    it.engine.stop(drain=True, deadline_s=0.05)
    assert it.ended["a"].wait(30)
    assert it.watcher.reason("a") == "abort"


def test_a_dead_loop_says_so_to_everyone(tiny: LoadedModel) -> None:
    class Broken(StepObserver):
        def step_finished(self, step: object) -> None:
            raise RuntimeError("broken")

    ended = threading.Event()
    outputs: list[TokenOutput] = []

    def on_outputs(given: list[TokenOutput]) -> None:
        outputs.extend(given)
        if given[-1].finish_reason is not None:
            ended.set()

    engine = Engine(tiny, EngineConfig(), observer=Broken(), on_outputs=on_outputs)
    engine.submit("a", [1, 2, 3], LONG)
    engine.start()
    assert ended.wait(30)
    engine._thread.join(30)
    assert outputs[-1].finish_reason == "error" and "broken" in str(outputs[-1].error)
    assert not engine.healthy
    with pytest.raises(EngineStopped):
        engine.submit("b", [1], GREEDY)


def test_sampled_requests_repeat_with_their_seed(new_engine: NewEngine) -> None:
    engine, watcher = new_engine()
    seeded = SamplingParams(max_tokens=12, seed=42, ignore_eos=True)
    for name in ("a", "b"):
        engine.submit(name, [1, 2, 3], seeded)
    engine.submit("c", [1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True))
    finish(engine)
    assert watcher.tokens("a") == watcher.tokens("b") != watcher.tokens("c")


def test_metrics_count_what_happened(new_engine: NewEngine) -> None:
    engine, _ = new_engine()
    for name in ("a", "b"):
        engine.submit(name, list(range(40)), GREEDY)
        finish(engine)
    value = engine.metrics.registry.get_sample_value
    lookup = {"cache_name": "prefix", "operation": "lookup"}
    assert value("cache_request_total", lookup) == 4
    assert value("cache_hit_total", lookup) == 2
    for result in ("hit", "miss"):
        labels = {"cache_name": "prefix", "result": result}
        assert value("cache_operation_latency_seconds_count", labels) == 1
    assert value("dsagent_reference_tokens_total", {"kind": "prefill"}) == 40 + 8
    assert value("dsagent_reference_tokens_total", {"kind": "generated"}) == 16
    assert value("dsagent_reference_requests_finished_total", {"reason": "length"}) == 2
    assert value("dsagent_reference_step_duration_seconds_count") == 16


@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 0}, {"max_num_batched_tokens": 8}, {"num_kv_blocks": 0}, {"threads": 0}],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        EngineConfig(**settings)
