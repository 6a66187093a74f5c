"""Sampling takes what --max-overhead leaves, and no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import TARGET

from dsagent.agent.profiles.pace import (
    MAX_PAUSE_S,
    MAX_RATE_HZ,
    RUN_S,
    Price,
    allowance,
    is_paid,
    pause_after,
    plan,
)
from dsagent.agent.sources.cpu_clock import CpuClockSource

PRICE = Price(start_ns=20e6, look_ns=0.5e6)


def test_with_room_it_looks_as_often_as_it_may() -> None:
    made = plan(PRICE, 0.05, cpus=2)
    assert made is not None
    assert (made.rate_hz, made.pause_s) == (MAX_RATE_HZ, 0.0)


def test_with_less_room_it_looks_more_rarely_then_pauses_then_stops() -> None:
    slower = plan(PRICE, 0.003, cpus=2)
    assert slower is not None and 5 <= slower.rate_hz < MAX_RATE_HZ and slower.pause_s == 0.0
    paused = plan(PRICE, 0.0005, cpus=2)
    assert paused is not None and paused.rate_hz == 5 and paused.pause_s > 10
    assert plan(PRICE, 0.000001, cpus=2) is None
    assert plan(PRICE, 0.0, cpus=2) is None


@given(st.floats(1e6, 1e9), st.floats(1e4, 1e8), st.floats(0.0, 1.0), st.integers(1, 256))
def test_a_plan_costs_no_more_than_allowed(
    start_ns: float, look_ns: float, ratio: float, cpus: int
) -> None:
    price = Price(start_ns, look_ns)
    made = plan(price, ratio, cpus)
    if made is not None:
        spent = price.run_ns(made.rate_hz) / ((RUN_S + made.pause_s) * 1e9 * cpus)
        assert spent <= ratio * 1.001


def test_others_are_paid_first() -> None:
    assert allowance(0.01, 0.0, 0.0) == 0.005
    assert allowance(0.01, 0.008, 0.0) == 0.01 - 0.008
    assert allowance(0.01, 0.012, 0.004) == 0.01 - 0.008  # its own part is no reason to stop
    assert allowance(0.01, 0.012, 0.0) == 0.0


def test_samplers_share_their_half() -> None:
    assert allowance(0.01, 0.002, 0.0, beside_ratio=0.002) == 0.005 - 0.002
    assert allowance(0.01, 0.008, 0.0, beside_ratio=0.001) == 0.01 - 0.008
    assert allowance(0.01, 0.006, 0.0, beside_ratio=0.006) == 0.0


def test_another_run_begins_once_the_last_is_paid() -> None:
    assert is_paid(100_000_000, 0.005, cpus=2, elapsed_ns=10_000_000_000)
    assert not is_paid(100_000_001, 0.005, cpus=2, elapsed_ns=10_000_000_000)
    assert not is_paid(1, 0.0, cpus=2, elapsed_ns=10**18)


def test_the_price_follows_what_runs_take() -> None:
    price = PRICE
    for _ in range(20):
        price = price.learn(20, 240_000_000)
    assert abs(price.run_ns(20) - 240e6) < 1e6
    assert PRICE.learn(20, 0).run_ns(20) > 0


def test_what_was_taken_for_nothing_is_paid_with_a_pause() -> None:
    assert pause_after(60_000_000, 0.005, cpus=2) == 6.0
    assert pause_after(60_000_000, 0.0, cpus=2) == MAX_PAUSE_S
    assert pause_after(10**12, 0.005, cpus=2) == MAX_PAUSE_S


def test_the_cpu_clock_does_not_pay_for_itself_twice() -> None:
    source = CpuClockSource(TARGET, lambda: (), 0.01)
    source.ratio = 0.003
    source.pace(0.009)
    assert source._allowed_ratio == pytest.approx(0.01 - (0.009 - 0.003))
