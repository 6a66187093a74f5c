"""A timer for a loop that watches another loop."""

from __future__ import annotations

import random


class Ticker:
    """Absolute deadlines, each moved a little at random.

    Deadlines lie on a fixed grid, so that a late tick does not delay those after it; the jitter
    keeps the grid from falling into step with the target's own period. Deadlines that have
    passed unused are skipped and counted, never made up for in a burst.
    """

    def __init__(
        self,
        interval_ns: int,
        now_ns: int,
        *,
        jitter_ratio: float = 0.2,
        rng: random.Random | None = None,
    ) -> None:
        self._rng = rng or random.Random()
        self._jitter_ratio = jitter_ratio
        self._grid_ns = now_ns
        self.interval_ns = interval_ns  # may be changed at any time; counts from the next tick on
        self.skipped = 0
        self.deadline_ns = self._next()

    def _next(self) -> int:
        self._grid_ns += self.interval_ns
        spread = self._jitter_ratio * self.interval_ns
        return self._grid_ns + round(self._rng.uniform(-spread, spread) / 2)

    def advance(self, now_ns: int) -> int:
        """Call when the deadline has passed: sets the next one and returns the lag in ns."""
        lag_ns = now_ns - self.deadline_ns
        missed = max(0, (now_ns - self._grid_ns) // self.interval_ns)
        self.skipped += missed
        self._grid_ns += missed * self.interval_ns
        self.deadline_ns = self._next()
        return max(0, lag_ns)
