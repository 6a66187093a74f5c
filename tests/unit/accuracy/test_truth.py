"""What was done to whom, by hand-made times."""

from __future__ import annotations

import pytest

from load import Sent  # isort: skip  # of the laboratory
from truth import Fault, Injection, Pace, Timeline, hurts, life  # isort: skip


def test_injected_time_within_a_life() -> None:
    line = Timeline.of([(100, 200), (300, 350)])
    assert line.within(0, 1000) == 150
    assert line.within(150, 310) == 60
    assert line.within(200, 300) == 0
    assert Timeline.of([]).within(0, 10) == 0


def test_a_counter_that_starts_late_or_not_at_zero() -> None:
    line = Timeline([(100, 7.0), (200, 17.0)])
    assert line.within(0, 50) == 0
    assert line.within(150, 1000) == 5


def sent(start_ns: int, gaps: list[int]) -> Sent:
    one = Sent("aa", "hello", 8, clients=2, sent_ns=start_ns)
    at_ns = start_ns
    for gap in gaps:
        at_ns += gap
        one.chunk_ns.append(at_ns)
    one.first_ns, one.end_ns = one.chunk_ns[0], at_ns
    return one


def test_what_a_request_took_beyond_the_pace_of_its_likes() -> None:
    deed = Injection("x", 1_000, 1_200)
    usual = sent(0, [50, 10, 10, 10, 1, 1])
    harmed = sent(990, [50, 10, 110, 10, 10, 10])
    pace = Pace([usual, harmed], [deed])
    assert pace.gap_ns(2) == 10
    assert pace.gap_ns(3) is None
    assert pace.excess_ns(harmed, 1_000, 1_200) == pytest.approx(100)
    assert pace.excess_ns(harmed, 1_000, 1_200, least_gap=5.0) == pytest.approx(100)
    assert pace.excess_ns(harmed, 1_000, 1_040) == pytest.approx(0)


def test_a_deed_hurts_who_lost_a_tenth_of_the_time_by_its_own_clock() -> None:
    usual, harmed = sent(0, [50, 10, 10, 10, 1, 1]), sent(990, [50, 10, 110, 10, 10, 10])
    both = [usual, harmed]
    fault = Fault("x", frozenset({"cpu.irq"}), "counterfactual", life)
    deed = Injection("x", 1_000, 1_200)
    assert hurts(deed, fault, both, [deed])
    early = Injection("x", 1_000, 1_040)  # over before it took anything
    assert not hurts(early, fault, both, [early])
    logged = Injection("x", 1_000, 1_200, Timeline.of([(1_000, 1_015)]))
    assert not hurts(logged, fault, both, [logged])
    logged = Injection("x", 1_000, 1_200, Timeline.of([(1_000, 1_025)]))
    assert hurts(logged, fault, both, [logged])


def test_whom_a_deed_may_hurt() -> None:
    harmed = sent(990, [50, 10, 110, 10, 10, 10])
    usual = sent(0, [50, 10, 10, 10, 1, 1])
    fault = Fault("x", frozenset({"cpu.irq"}), "counterfactual", life)
    own = Injection("x", 1_000, 1_200, senders=frozenset({"aa"}))
    assert not hurts(own, fault, [usual, harmed], [own])
    unseen = Injection("x", 1_000, 1_200, victims=frozenset({"bb"}))
    assert hurts(unseen, fault, [usual, harmed], [unseen])
