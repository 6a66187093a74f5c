"""The clock's bracket and the ticker's grid."""

from __future__ import annotations

import random
from collections.abc import Iterator

from dsagent.agent.facts import ClockAnchor
from dsagent.agent.host.clock import RENEW_NS, Clock, read_anchor
from dsagent.agent.session.ticker import Ticker

MS = 1_000_000


def test_the_tightest_bracket_wins() -> None:
    mono: Iterator[int] = iter([0, 1000, 2000, 2100, 5000, 9000])
    unix: Iterator[int] = iter([70_000, 71_000, 74_000])
    anchor = read_anchor(3, mono=lambda: next(mono), unix=lambda: next(unix))
    assert anchor == ClockAnchor(mono_ns=2050, unix_ns=71_000, error_ns=50)
    assert anchor.unix(2150) == 71_100


def test_the_real_clocks_agree_within_the_bound() -> None:
    first, second = read_anchor(), read_anchor()
    drift_ns = abs(second.unix_ns - first.unix(second.mono_ns))
    assert drift_ns <= first.error_ns + second.error_ns + MS  # what NTP may slew in between


def test_a_stepped_wall_clock_widens_the_bound() -> None:
    anchors = iter([ClockAnchor(0, 0, 40), ClockAnchor(RENEW_NS, RENEW_NS + 3 * MS, 50)])
    clock = Clock(lambda: next(anchors))
    assert clock.anchor(RENEW_NS - 1).mono_ns == 0
    assert clock.error_ns == 40
    assert clock.anchor(RENEW_NS).unix_ns == RENEW_NS + 3 * MS
    assert clock.error_ns == 3 * MS + 50


def test_deadlines_stay_on_their_grid_and_jitter_around_it() -> None:
    ticker = Ticker(100 * MS, 0, rng=random.Random(7))
    deadlines = []
    for _ in range(500):
        deadlines.append(ticker.deadline_ns)
        assert ticker.advance(ticker.deadline_ns + MS) == MS
    offsets = [deadline - 100 * MS * (i + 1) for i, deadline in enumerate(deadlines)]
    assert max(map(abs, offsets)) <= 10 * MS
    assert min(offsets) < -5 * MS
    assert max(offsets) > 5 * MS
    assert ticker.skipped == 0


def test_a_late_tick_skips_what_it_missed() -> None:
    ticker = Ticker(100 * MS, 0, jitter_ratio=0.0)
    assert ticker.advance(450 * MS) == 350 * MS
    assert ticker.skipped == 3
    assert ticker.deadline_ns == 500 * MS
    ticker.interval_ns = 250 * MS
    assert ticker.advance(500 * MS) == 0
    assert ticker.deadline_ns == 750 * MS
