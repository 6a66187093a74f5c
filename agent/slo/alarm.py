"""One alarm: a series burning at one severity, from firing to resolved. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dsagent.agent.slo.policy import MIN_BAD, BurnWindow, Severity, is_evident
from dsagent.agent.slo.window import S, SlidingCounts

AlarmState = Literal["quiet", "firing", "no data"]

LEAST_SILENCE_S = 10.0
SILENT_GAPS = 3  # longer than so many of the longest usual gaps between requests is silence
GAP_MEMORY_S = 600.0
RECOVERY_EVENTS = 5  # so many must be seen, good enough, before it is said to be over
MOST_REMEMBERED = 64


@dataclass(slots=True)
class Arrivals:
    """When requests come, and so when they have stopped coming."""

    last_ns: int
    _longest_ns: float = 0.0  # of the gaps between them; forgotten slowly

    def add(self, now_ns: int) -> None:
        gap_ns = now_ns - self.last_ns
        kept_ns = self._longest_ns * math.exp(-gap_ns / (GAP_MEMORY_S * S))
        self._longest_ns = max(gap_ns, kept_ns)
        self.last_ns = now_ns

    def have_stopped(self, now_ns: int) -> bool:
        patience_ns = max(LEAST_SILENCE_S * S, SILENT_GAPS * self._longest_ns)
        return now_ns - self.last_ns >= patience_ns


@dataclass(slots=True)
class Alarm:
    """quiet → firing: both windows of one pair burn, by evidence.
    firing → quiet: none has burnt for the short window's length, and enough requests since then
    were good enough. When requests stop it is not over but "no data": recovered is not gone.
    no data → firing or quiet, by the same two rules."""

    severity: Severity
    windows: tuple[BurnWindow, ...]
    budget_ratio: float
    state: AlarmState = "quiet"
    since_ns: int = 0  # began to fire
    window: BurnWindow | None = None  # the one that fires, or fired last
    _burnt_ns: int = 0  # the last moment at which it burnt
    _events: int = 0  # since it burnt last
    _bad: int = 0

    def add(self, is_bad: bool) -> None:
        self._events += 1
        self._bad += is_bad
        if self._events >= MOST_REMEMBERED:  # what was long ago counts less
            self._events //= 2
            self._bad //= 2

    def judge(
        self,
        counts: Mapping[float, SlidingCounts],
        first_ns: int,
        now_ns: int,
        *,
        have_stopped: bool,
    ) -> AlarmState | None:
        """The new state, where it has changed. `counts` by the length of the window in s;
        `first_ns`: when the series was first seen; `have_stopped`: its requests. The windows
        remember what was, but nobody knows what is."""
        if have_stopped:
            return None if self.state == "quiet" else self._turn("no data")
        burning = [
            window
            for window in self.windows
            if now_ns - first_ns >= window.short_s * S
            and is_burning(window, counts, self.budget_ratio, now_ns)
        ]
        if burning:
            self.window = burning[0]
            self._burnt_ns = now_ns
            self._events = self._bad = 0
            if self.state == "quiet":
                self.since_ns = now_ns
            return self._turn("firing")
        if self.state == "quiet" or self.window is None:
            return None
        if self._is_over(self.window, now_ns):
            return self._turn("quiet")
        return None

    def unseen(self, length_ns: int) -> None:
        """Nobody looked for so long: that time has not passed for it."""
        self._burnt_ns += length_ns

    def _is_over(self, window: BurnWindow, now_ns: int) -> bool:
        if now_ns - self._burnt_ns < window.short_s * S or self._events < RECOVERY_EVENTS:
            return False
        allowed = self._events * window.threshold_ratio(self.budget_ratio)
        return self._bad <= max(allowed, MIN_BAD - 1)

    def _turn(self, state: AlarmState) -> AlarmState | None:
        if state == self.state:
            return None
        self.state = state
        return state


def is_burning(
    window: BurnWindow, counts: Mapping[float, SlidingCounts], budget: float, now_ns: int
) -> bool:
    """Both windows above the threshold, and the long one by more than chance."""
    events, bad = counts[window.long_s].counts(now_ns)
    recent, recent_bad = counts[window.short_s].counts(now_ns)
    threshold = window.threshold_ratio(budget)
    if not recent_bad or bad <= events * threshold or recent_bad <= recent * threshold:
        return False
    return is_evident(bad, events, budget, window.max_chance)
