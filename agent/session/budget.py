"""What follows from the cost of looking: one tier down where it is too high, one up again where the
tier above would fit.

Pure: windows of the overhead meter in, verdicts out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsagent.agent.probes import TIERS, Tier
from dsagent.agent.session.overhead import Window

Level = Literal["off", "core", "default", "full"]
LEVELS: tuple[Level, ...] = ("off", *TIERS)

PATIENCE_WINDOWS = 2  # 10 s: a single window may be bad luck
CALM_WINDOWS = 6  # 30 s in which the tier above would have fitted, before it is tried
CALM_WINDOWS_MAX = 120  # doubled up to this each time that it did not fit after all
HEADROOM_RATIO = 0.8  # of the limit: what a tier may cost by prediction

Action = Literal["go on", "look more rarely", "step down", "step up", "relax", "say so"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`level`: what holds from now on. `predicted_ratio`: what it will cost, where it steps up."""

    action: Action
    level: Level
    predicted_ratio: float | None = None


class Budget:
    """Judges each window of the overhead meter.

    Over the limit for two windows in a row, the kernel source looks at a tier less, if its
    programs take at least half of what is allowed; where nothing is left that would help, that is
    said once until the cost has been within the limit again. It looks at a tier more when that
    would have fitted for a while: what a tier costs for each switch of the machine is known, since
    only tiers that have run are come back to. Each attempt that fails doubles the while.
    """

    def __init__(self, max_ratio: float, tier: Tier) -> None:
        """`tier`: what was asked for, never gone beyond."""
        self._max_ratio = max_ratio
        self._highest: Level = tier
        self.level: Level = tier
        self._over = self._calm = 0  # windows in a row
        self._needed = CALM_WINDOWS
        self._since_up: int | None = None  # windows
        self._said = False
        self._prices: dict[Level, float] = {}  # of the programs, for each switch a second
        self._displaced_ratio = 0.0  # when last known

    def judge(self, window: Window, *, runs: bool) -> Verdict:
        """`runs`: whether the kernel source does. Where it is off by our own doing it may run
        again; where it is not, nothing can be switched."""
        if runs:
            self._prices[self.level] = window.kernel_ratio / max(1.0, window.switches_per_s)
            self._displaced_ratio = window.agent_ratio
        if self._since_up is not None:
            self._since_up += 1
        over = window.ratio > self._max_ratio
        self._over = self._over + 1 if over else 0
        self._said &= over
        if over and runs:
            self._calm = 0
            if self._over >= PATIENCE_WINDOWS and 2 * window.kernel_ratio >= self._max_ratio:
                return self._down()
        elif verdict := self._up(window, runs):
            return verdict
        if not over:
            return Verdict("go on", self.level)
        if self._over < PATIENCE_WINDOWS or self._said:
            return Verdict("look more rarely", self.level)
        self._said = True
        return Verdict("say so", self.level)

    def _down(self) -> Verdict:
        in_vain = self._since_up is not None and self._since_up <= self._needed
        self._needed = min(2 * self._needed, CALM_WINDOWS_MAX) if in_vain else CALM_WINDOWS
        self._since_up = None
        self._over = 0
        self.level = LEVELS[LEVELS.index(self.level) - 1]
        return Verdict("step down", self.level)

    def _up(self, window: Window, runs: bool) -> Verdict | None:
        predicted = None
        if self.level != self._highest and (runs or self.level == "off"):
            above = LEVELS[LEVELS.index(self.level) + 1]
            predicted = self._predict(window, above)
            if predicted > HEADROOM_RATIO * self._max_ratio:
                self._calm = 0
                return None
        elif window.ratio > self._max_ratio:  # whatever it is that costs, it is not less of it
            self._calm = 0
            return None
        self._calm += 1
        if self._calm < self._needed:
            return None
        self._calm = 0
        if predicted is None:
            return Verdict("relax", self.level)
        self.level = above
        self._since_up = 0
        return Verdict("step up", self.level, predicted)

    def _predict(self, window: Window, level: Level) -> float:
        """What a window like this one would have cost with another level's programs."""
        programs = self._prices[level] * window.switches_per_s
        return programs + self._displaced_ratio + window.hooks_ratio
