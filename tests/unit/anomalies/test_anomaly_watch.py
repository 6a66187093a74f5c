"""Made-up steps and requests with known noise, and what the watch tells of them."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from made import MS, S, account, step

from dsagent.agent.anomalies.detector import MAX_SETTINGS, Detector
from dsagent.agent.anomalies.episodes import REST_NS, USUAL_NS
from dsagent.agent.anomalies.features import (
    REQUEST_E2E_NS,
    STEP_DURATION_NS,
    of_account,
    of_step,
)
from dsagent.agent.anomalies.watch import KEPT_FINDINGS, MAX_TRACES, AnomalyWatch
from dsagent.agent.attribution.account import Part
from dsagent.agent.facts import Event
from dsagent.instrumentation import names
from dsagent.instrumentation.records import RequestOpen, Step, request_key

EVERY_NS = 20 * MS
START_NS = 2000 * S


class Steps:
    """Steps of 16 ms, 50 a second, whose parts vary by a tenth, with a long one now and then."""

    def __init__(self, seed: int = 1, every_ns: int = EVERY_NS) -> None:
        self._dice = random.Random(seed)
        self._every_ns = every_ns
        self.number = 0

    @property
    def now_ns(self) -> int:
        return START_NS + self.number * self._every_ns

    def next(self, **times: float) -> Step:
        """`times`: what each part's duration is multiplied by."""
        self.number += 1
        parts = {"schedule_ns": 0.2, "prepare_ns": 0.5, "forward_ns": 14.0, "sample_ns": 0.4}
        made: dict[str, Any] = {}
        for part, usual_ms in parts.items():
            value = usual_ms * self._dice.lognormvariate(0, 0.1) * times.get(part, 1.0)
            if self._dice.random() < 0.01:
                value *= self._dice.uniform(2, 20)
            made[part] = round(value * MS)
        names_ = (f"r{self.number // 40}", f"q{self.number // 40}")
        return step(
            self.number,
            names_,
            start_ns=self.now_ns,
            end_ns=self.now_ns + sum(made.values()) + 300_000,
            output_ns=200_000,
            **made,
        )


def run(watch: AnomalyWatch, steps: Steps, count: int, **times: float) -> list[Event]:
    """A tick for every 10 steps; each request is told when its first step comes."""
    told: list[Event] = []
    for _ in range(count // 10):
        batch = [steps.next(**times) for _ in range(10)]
        opened = {
            share.request_key: opened_request(share.request_key)
            for each in batch
            for share in each.shares
        }
        told += watch.look(opened.values(), batch, (), steps.now_ns)
    return told


def opened_request(key: int) -> RequestOpen:
    return RequestOpen(key, f"{key}", key << 4 | 1, 1, None, None, START_NS, 1, 1)


def named(events: list[Event]) -> list[tuple[str, str | int]]:
    return [(each.name, each.attributes["dsagent.anomaly.feature"]) for each in events]


@pytest.mark.parametrize("seed", range(3))
def test_no_fault_no_finding(seed: int) -> None:
    watch, steps = AnomalyWatch(), Steps(seed)
    assert run(watch, steps, 5000) == []
    assert watch.document() == []


@pytest.mark.parametrize(
    ("part", "times"), [("sample_ns", 30.0), ("forward_ns", 1.6), ("schedule_ns", 80.0)]
)
def test_the_part_that_moved_is_named_with_its_figures_and_traces(part: str, times: float) -> None:
    watch, steps = AnomalyWatch(), Steps()
    assert run(watch, steps, 1000) == []
    fault_began = steps.number
    told = run(watch, steps, 200, **{part: times})
    feature = f"dsagent.step.{part}"
    assert named(told) == [("anomaly.begun", feature)]
    (found,) = watch.document()
    usual_ns = {"sample_ns": 0.4, "forward_ns": 14, "schedule_ns": 0.2}[part] * MS
    assert found["usual"] == pytest.approx(usual_ns, rel=0.1)
    assert found["value"] == pytest.approx(times * usual_ns, rel=0.15)
    assert (found["unit"], found["kind"]) == ("ns", "step")
    assert STEP_DURATION_NS in found["also"]
    keys = {
        request_key(f"{who}{n // 40}") for n in range(fault_began, steps.number) for who in "rq"
    }
    assert found["trace_ids"]
    assert set(found["trace_ids"]) <= {f"{key << 4 | 1:032x}" for key in keys}
    assert told[0].trace_ids == tuple(found["trace_ids"])
    assert feature in told[0].message
    # It ends, once, and says so.
    told = run(watch, steps, 1000)
    assert named(told) == [("anomaly.ended", feature)]
    (found,) = watch.document()
    assert found["state"] == "ended"
    assert run(watch, steps, 1000) == []


def test_one_long_step_is_no_finding() -> None:
    watch, steps = AnomalyWatch(), Steps()
    run(watch, steps, 1000)
    assert watch.look((), [steps.next(forward_ns=200.0)], (), steps.now_ns) == []
    assert run(watch, steps, 500) == []


def test_an_anomaly_does_not_teach_that_it_is_usual() -> None:
    watch, steps = AnomalyWatch(), Steps(every_ns=10 * EVERY_NS)
    run(watch, steps, 1000)
    told = run(watch, steps, 5 * 240, forward_ns=2.0)  # four minutes of it
    assert len(told) == 1
    assert watch.document()[0]["state"] == "begun"  # and still so
    assert named(run(watch, steps, 1000)) == [("anomaly.ended", names.STEP_FORWARD_NS)]
    assert len(run(watch, steps, 500, forward_ns=2.0)) == 1  # known again at once


def test_what_lasts_ten_minutes_is_usual_from_then_on() -> None:
    watch, steps = AnomalyWatch(), Steps(every_ns=10 * EVERY_NS)
    run(watch, steps, 1000)
    told = run(watch, steps, USUAL_NS // (10 * EVERY_NS) + 1000, forward_ns=2.0)
    assert named(told) == [
        ("anomaly.begun", names.STEP_FORWARD_NS),
        ("anomaly.usual_now", names.STEP_FORWARD_NS),
    ]


def test_a_fault_that_comes_and_goes_makes_no_storm() -> None:
    watch, steps = AnomalyWatch(), Steps()
    run(watch, steps, 1000)
    told = []
    for _ in range(60):  # two minutes: a second with, a second without
        told += run(watch, steps, 50, forward_ns=3.0)
        told += run(watch, steps, 50)
    assert len(told) <= 2


def test_after_an_episode_it_rests() -> None:
    watch, steps = AnomalyWatch(), Steps()
    run(watch, steps, 1000)
    told = []
    for _ in range(12):  # two minutes: long enough without for an episode to be over
        told += run(watch, steps, 150, forward_ns=3.0)
        told += run(watch, steps, 350)
    assert len(told) >= 4
    for earlier, later in pairwise(told):
        if later.name == "anomaly.begun":
            assert later.mono_ns - earlier.mono_ns >= REST_NS


def test_a_larger_movement_is_told_while_a_smaller_one_lasts() -> None:
    watch, steps = AnomalyWatch(), Steps()
    run(watch, steps, 1000)
    told = run(watch, steps, 2000, sample_ns=10.0)
    told += run(watch, steps, 500, sample_ns=10.0, forward_ns=3.0)
    assert named(told) == [
        ("anomaly.begun", names.STEP_SAMPLE_NS),
        ("anomaly.begun", names.STEP_FORWARD_NS),
    ]
    told = run(watch, steps, 1000)
    assert len(told) == 1
    assert {each["state"] for each in watch.document()} == {"ended"}


def test_a_larger_batch_is_another_setting() -> None:
    watch, steps = AnomalyWatch(), Steps()
    run(watch, steps, 1000)
    many = tuple(f"r{n}" for n in range(64))
    for _ in range(200):
        slower = steps.next(forward_ns=4.0)
        shares = tuple(slower.shares[0]._replace(request_key=request_key(name)) for name in many)
        assert watch.look((), [replace(slower, shares=shares)], (), steps.now_ns) == []


def test_nothing_is_told_while_it_is_new() -> None:
    watch, steps = AnomalyWatch(), Steps()
    assert run(watch, steps, 50) == []
    assert watch.samples(steps.now_ns)[0].attributes == {"kind": "step"}  # nothing compared yet


def flat(count: int, **changes: Any) -> Iterator[Step]:
    for number in range(count):
        yield step(number, start_ns=START_NS + number * EVERY_NS, **changes)


def test_flat_and_absent_features_score_nothing() -> None:
    detector = Detector("step")
    for each in flat(500, sample_ns=0):
        observed = of_step(each)
        assert observed is not None
        assert names.STEP_SAMPLE_NS not in observed.values
        detector.add(observed)
    assert not detector.suspicions
    # A flat feature that moves by less than a thirtieth of the step is still flat.
    for each in flat(100, sample_ns=0, schedule_ns=MS + 500_000):
        observed = of_step(each)
        assert observed is not None
        detector.add(observed)
    assert not detector.suspicions
    # A part that comes for the first time is learnt first.
    for each in flat(100):
        observed = of_step(each)
        assert observed is not None
        detector.add(observed)
    assert not list(detector.moved())


def test_impossible_and_inferred_steps_are_left_out() -> None:
    assert of_step(step(end_ns=2050 * S)) is None
    assert of_step(step(inferred=True)) is None
    assert of_account(account(partial=True)) is None
    assert of_account(account(error="abort")) is None
    assert of_account(replace(account(), finished=False)) is None


def requests(
    count: int, change: Callable[[int], int], first: int = 0, seed: int = 3
) -> Iterator[Any]:
    """A request a second; `change` adds ns of cpu.runqueue to each."""
    dice = random.Random(seed)
    for number in range(first, first + count):
        decode_ns = round(900 * MS * dice.lognormvariate(0, 0.1))
        delay_ns = change(number)
        start_ns = START_NS + number * S
        base = account(
            f"r{number}", start_ns=start_ns, sent_ns=start_ns + 100 * MS + decode_ns + delay_ns
        )
        parts = [Part("decode.compute", decode_ns, "modelled")]
        if delay_ns:
            parts.append(Part("cpu.runqueue", delay_ns, "measured"))
        yield replace(base, parts=tuple(parts), unattributed_ns=100 * MS)


def look(watch: AnomalyWatch, accounts: Iterator[Any]) -> list[Event]:
    return [
        event for each in accounts for event in watch.look((), (), (each,), each.record.sent_ns)
    ]


def test_a_cause_of_requests_that_came_up_is_named_with_their_traces() -> None:
    watch = AnomalyWatch()
    assert look(watch, requests(200, lambda _: 0)) == []
    told = look(watch, requests(6, lambda _: 400 * MS, first=200))
    assert named(told) == [("anomaly.begun", names.part("cpu.runqueue"))]
    (found,) = watch.document()
    assert (found["kind"], found["usual"]) == ("request", 0)
    assert found["value"] == pytest.approx(400 * MS)
    assert REQUEST_E2E_NS in found["also"]
    keys = [request_key(f"r{number}") for number in range(200, 206)]
    assert set(found["trace_ids"]) <= {f"{key << 64 | key:032x}" for key in keys}
    assert len(found["trace_ids"]) >= 3
    assert named(look(watch, requests(60, lambda _: 0, first=206))) == [
        ("anomaly.ended", names.part("cpu.runqueue"))
    ]


def test_what_the_agent_did_not_see_is_no_feature_and_hides_the_parts() -> None:
    made = account()
    unseen = replace(made.parts[0], cause="unobserved")
    observed = of_account(replace(made, parts=(unseen, *made.parts[1:])))
    assert observed is not None
    assert not [feature for feature in observed.values if feature.startswith("dsagent.part.")]
    assert observed.values["dsagent.request.e2e_ns"] == made.e2e_ns


def test_one_slow_request_is_no_finding() -> None:
    watch = AnomalyWatch()
    delays = {150: 5000 * MS}
    assert look(watch, requests(300, lambda number: delays.get(number, 0))) == []


def test_counters_begin_at_nothing_and_count_findings() -> None:
    watch, steps = AnomalyWatch(), Steps()
    run(watch, steps, 1000)

    def shown() -> dict[tuple[str, str | None], float]:
        steps.number += 100  # two seconds
        samples = watch.samples(steps.now_ns)
        return {
            (s.name, s.attributes.get("feature")): s.value
            for s in samples
            if s.attributes["kind"] == "step"
        }

    before = shown()
    assert before["dsagent.anomaly.findings", names.STEP_FORWARD_NS] == 0
    assert before["dsagent.anomaly.active", None] == 0
    run(watch, steps, 200, forward_ns=2.0)
    after = shown()
    assert after["dsagent.anomaly.findings", names.STEP_FORWARD_NS] == 1
    assert after["dsagent.anomaly.active", None] == 1
    assert all(math.isfinite(value) for value in after.values())


def test_memory_is_bounded_whatever_comes() -> None:
    watch, dice = AnomalyWatch(), random.Random(1)
    tracemalloc.start()
    try:
        for number in range(1500):
            names_ = tuple(f"{number}-{n}" for n in range(dice.randrange(1, 40)))
            end_ns = START_NS + number * EVERY_NS + dice.randrange(1, 10**9)
            each = step(
                number,
                names_,
                engine_id=dice.randrange(1 << 60),
                start_ns=START_NS + number * EVERY_NS,
                end_ns=end_ns,
                prefill_tokens=dice.randrange(1 << dice.randrange(1, 60)),
            )
            opened = [opened_request(share.request_key) for share in each.shares]
            watch.look(opened, [each], (), end_ns)
            if number == 1000:
                base = tracemalloc.get_traced_memory()[0]
        grown = tracemalloc.get_traced_memory()[0] - base
    finally:
        tracemalloc.stop()
    assert grown < 1 << 20
    assert len(watch._trace_ids) <= MAX_TRACES
    assert len(watch._steps.detector._settings) <= MAX_SETTINGS
    assert len(watch.document()) <= KEPT_FINDINGS
