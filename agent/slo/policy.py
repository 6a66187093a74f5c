"""Multi-window, multi-burn-rate alerting as in Google's SRE workbook (chapter 5), and the guard
that keeps few events from alarming anybody. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Severity = Literal["page", "ticket"]

MIN_EVENTS = 10  # in the long window; fewer say nothing
MIN_BAD = 2  # one error never pages
MAX_CHANCE = 1e-4  # of so many bad events in a service that keeps to its objective exactly
MAX_DEVIATIONS = 3.72  # the same chance, as deviations of a normal distribution
MOST_THRESHOLD_RATIO = 0.95  # where a burn rate times the budget would be more than everything

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class BurnWindow:
    """Burning `factor` times as fast as the budget allows, over both windows, in seconds."""

    severity: Severity
    factor: float
    long_s: float
    short_s: float
    max_chance: float = MAX_CHANCE

    def threshold_ratio(self, budget_ratio: float) -> float:
        """Of all events, which ratio must be bad; 0 where nothing may fail."""
        return min(self.factor * budget_ratio, MOST_THRESHOLD_RATIO)


WORKBOOK = (
    BurnWindow("page", 14.4, HOUR_S, 5 * MINUTE_S),
    BurnWindow("page", 6.0, 6 * HOUR_S, 30 * MINUTE_S),
    BurnWindow("ticket", 3.0, DAY_S, 2 * HOUR_S),
    BurnWindow("ticket", 1.0, 3 * DAY_S, 6 * HOUR_S),
)
# An hour that began well hides minutes in which everything fails. The agent looks every fraction
# of a second, so it can tell sooner than rules over scrapes could. What is slow ends more rarely
# than what went before it and has to outweigh it: hence the shorter pair. The longer one is for
# those who have not ten requests in 15 seconds. There are thousands of such windows in a day, and
# each is a chance of a false alarm: less of it is left to them.
AT_ONCE = (
    BurnWindow("page", 14.4, 15.0, 5.0, max_chance=1e-6),
    BurnWindow("page", 14.4, MINUTE_S, 5.0, max_chance=1e-6),
)


def windows(divided_by: float = 1.0) -> tuple[BurnWindow, ...]:
    """The workbook's windows, shorter by a factor for demonstrations."""
    return tuple(
        BurnWindow(each.severity, each.factor, each.long_s / divided_by, each.short_s / divided_by)
        for each in WORKBOOK
    )


def agent_windows(divided_by: float = 1.0) -> tuple[BurnWindow, ...]:
    """Those of the agent's own evaluator."""
    scaled = windows(divided_by)
    return (*(window for window in AT_ONCE if window.long_s < scaled[0].long_s), *scaled)


def budget_ratio(objective_ratio: float) -> float:
    """0.01 for 0.99, without the noise of floating point."""
    return round(1.0 - objective_ratio, 9)


def burn_rate(bad: int, events: int, budget: float) -> float | None:
    """How many times faster than allowed; None where nothing happened, or nothing may fail."""
    if events <= 0 or budget <= 0:
        return None
    return bad / events / budget


def is_evident(bad: int, events: int, budget: float, max_chance: float = MAX_CHANCE) -> bool:
    """Whether so many bad ones are more than chance would make of an exactly kept objective."""
    if events < MIN_EVENTS or bad < MIN_BAD:
        return False
    return chance(bad, events, budget) <= max_chance


def chance(bad: int, events: int, ratio: float) -> float:
    """P(at least `bad` of `events`), each bad with probability `ratio`: the binomial's upper tail.
    1 where so many are expected anyhow."""
    if bad <= events * ratio:
        return 1.0
    if ratio <= 0:
        return 0.0
    log_first = (
        math.lgamma(events + 1)
        - math.lgamma(bad + 1)
        - math.lgamma(events - bad + 1)
        + bad * math.log(ratio)
        + (events - bad) * math.log1p(-ratio)
    )
    total = term = 1.0  # in units of the first term; above the mean each is smaller than the last
    for count in range(bad, events):
        term *= (events - count) / (count + 1) * (ratio / (1 - ratio))
        total += term
        if term < 1e-9 * total:
            break
    return min(1.0, math.exp(log_first) * total)
