"""What follows from a cost beyond the limit."""

from __future__ import annotations

from typing import Literal

PATIENCE_WINDOWS = 2  # 10 s: a single window may be bad luck

Verdict = Literal["within", "look more rarely", "switch the kernel source off", "say so"]


class Budget:
    """Judges each window of the overhead meter. What costs is switched off after two windows in a
    row over the limit; where nothing is left that would help, that is said once until the cost
    has been within the limit again."""

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        self._over = 0  # windows in a row
        self._said = False

    def judge(self, ratio: float, kernel_ratio: float | None) -> Verdict:
        """`kernel_ratio`: what the kernel source's programs take; None where it does not run."""
        if ratio <= self._max_ratio:
            self._over = 0
            self._said = False
            return "within"
        self._over += 1
        if self._over < PATIENCE_WINDOWS:
            return "look more rarely"
        if kernel_ratio is not None and 2 * kernel_ratio >= self._max_ratio:
            self._over = 0
            return "switch the kernel source off"
        if self._said:
            return "look more rarely"
        self._said = True
        return "say so"
