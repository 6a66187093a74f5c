"""Histograms whose bounds fit themselves to what they are fed: OpenTelemetry's exponential ones.

A bucket of index i holds values above base**i, up to base**(i+1), where base = 2**(2**-scale). A
scale that would need more than MAX_BUCKETS buckets is lowered, by which two buckets become one; so
the relative error is the same over the whole range, and small where the range is. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_BUCKETS = 160
MAX_SCALE = 20
MIN_SCALE = -10  # one bucket then holds every number that a float can be


@dataclass(frozen=True, slots=True)
class ExponentialPoint:
    """`counts[k]` is the bucket of index offset + k."""

    scale: int
    zero_count: int
    offset: int
    counts: tuple[int, ...]
    min: float
    max: float


class ExponentialHistogram:
    """Of values that are not negative; what is, or is no number, counts as zero."""

    __slots__ = ("_buckets", "_high", "_low", "_max", "_min", "_scale", "_zero")

    def __init__(self) -> None:
        self._scale = MAX_SCALE
        self._buckets: dict[int, int] = {}
        self._low = self._high = 0  # the indices in use, where there are any
        self._zero = 0
        self._min, self._max = math.inf, -math.inf

    def observe(self, value: float) -> None:
        if not 0 < value < math.inf:
            value = 0.0
        self._min, self._max = min(self._min, value), max(self._max, value)
        if value == 0.0:
            self._zero += 1
            return
        # log2 is exact for powers of two, which are bounds: they belong below.
        index = math.ceil(math.ldexp(math.log2(value), self._scale)) - 1
        if not self._buckets:
            self._low = self._high = index
        low, high = min(self._low, index), max(self._high, index)
        by = 0
        while (high >> by) - (low >> by) >= MAX_BUCKETS:
            by += 1
        if by:
            self._lower_scale(by)
            index >>= by
        self._low, self._high = min(self._low, index), max(self._high, index)
        self._buckets[index] = self._buckets.get(index, 0) + 1

    def _lower_scale(self, by: int) -> None:
        self._scale -= by
        merged: dict[int, int] = {}
        for index, count in self._buckets.items():
            merged[index >> by] = merged.get(index >> by, 0) + count
        self._buckets = merged
        self._low, self._high = self._low >> by, self._high >> by

    def point(self) -> ExponentialPoint:
        is_empty = not self._buckets
        indices = () if is_empty else range(self._low, self._high + 1)
        return ExponentialPoint(
            self._scale,
            self._zero,
            0 if is_empty else self._low,
            tuple(self._buckets.get(index, 0) for index in indices),
            self._min,
            self._max,
        )
