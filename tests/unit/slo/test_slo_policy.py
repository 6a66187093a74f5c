"""The windows, and the guard against too little evidence."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsagent.agent.slo.policy import (
    AT_ONCE,
    MAX_CHANCE,
    agent_windows,
    budget_ratio,
    burn_rate,
    chance,
    is_evident,
    windows,
)
from dsagent.agent.slo.window import S, SlidingCounts


def exact_chance(bad: int, events: int, ratio: Fraction) -> float:
    return float(
        sum(
            math.comb(events, k) * ratio**k * (1 - ratio) ** (events - k)
            for k in range(bad, events + 1)
        )
    )


@pytest.mark.parametrize(
    ("bad", "events", "percent"), [(3, 10, 1), (4, 10, 1), (10, 10, 1), (30, 200, 10), (3, 3, 50)]
)
def test_the_tail_is_the_binomial_one(bad: int, events: int, percent: int) -> None:
    expected = exact_chance(bad, events, Fraction(percent, 100))
    assert chance(bad, events, percent / 100) == pytest.approx(expected, rel=1e-6)


@given(
    st.integers(0, 10**7), st.integers(0, 10**7), st.floats(0, 1, allow_subnormal=False).map(float)
)
def test_it_is_a_probability_whatever_is_asked(a: int, b: int, ratio: float) -> None:
    bad, events = sorted((a, b))
    if ratio < 1:
        assert 0 <= chance(bad, events, ratio) <= 1


def test_little_evidence_is_none() -> None:
    assert not is_evident(1, 10, 0.01)
    assert not is_evident(9, 9, 0.01)
    assert not is_evident(1, 1_000_000, 0.0)
    assert not is_evident(3, 10, 0.01)  # 1 in 9,000
    assert is_evident(4, 10, 0.01)
    assert is_evident(2, 10, 0.0)
    assert chance(3, 10, 0.01) > MAX_CHANCE > chance(4, 10, 0.01)


def test_budgets_have_no_noise() -> None:
    assert budget_ratio(0.999) == 0.001
    assert budget_ratio(1.0) == 0.0
    assert burn_rate(3, 100, 0.01) == pytest.approx(3)
    assert burn_rate(0, 0, 0.01) is None
    assert burn_rate(3, 100, 0.0) is None


def test_the_workbooks_windows_scaled_and_not() -> None:
    assert [(w.severity, w.factor, w.long_s, w.short_s) for w in windows()] == [
        ("page", 14.4, 3600, 300),
        ("page", 6.0, 21600, 1800),
        ("ticket", 3.0, 86400, 7200),
        ("ticket", 1.0, 259200, 21600),
    ]
    assert (windows(60)[0].long_s, windows(60)[0].short_s) == (60, 5)
    assert agent_windows()[:2] == AT_ONCE
    assert len(agent_windows(60)) == 5
    assert agent_windows(3600) == windows(3600)
    assert windows()[0].threshold_ratio(0.01) == pytest.approx(0.144)
    assert windows()[0].threshold_ratio(0.3) == 0.95
    assert windows()[0].threshold_ratio(0.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 5)), max_size=60))
def test_sliding_counts_are_those_of_the_window(steps: list[tuple[float, int]]) -> None:
    counts, now_ns, seen = SlidingCounts(30.0), 0, []
    for gap_s, bad in steps:
        now_ns += round(gap_s * S)
        counts.add(now_ns, 5, bad)
        seen.append((now_ns, bad))
        within = [b for at, b in seen if at > now_ns - 30 * S]
        at_most = [b for at, b in seen if at >= now_ns - 31 * S]
        events, found = counts.counts(now_ns)
        assert 5 * len(within) <= events <= 5 * len(at_most)
        assert sum(within) <= found <= sum(at_most)
    assert counts.counts(now_ns + 40 * S) == (0, 0)
