"""What is usual for one feature in one setting: the quantiles of what was learnt last.

The quantiles are river's. Of that library only `river.stats` is imported (11 MB, 0.05 s):
`river.anomaly` and `river.drift` bring all of scipy along, 87 MB in a process whose bar is 120.
"""

from __future__ import annotations

from river.stats import RollingQuantile

# Upper quantile, and how many standard deviations above the median a normal distribution has it.
# A tenth of what is learnt may be outliers without moving it.
HIGH, HIGH_SIGMAS = 0.9, 1.2816


class Reference:
    """`usual_ns` and `spread_ns` are those of the last `window` values learnt; the spread is that
    of the upper side, since what is too long is looked for."""

    __slots__ = ("_high", "_median", "learnt", "learnt_ns", "spread_ns", "usual_ns")

    def __init__(self, window: int) -> None:
        self._median = RollingQuantile(0.5, window)
        self._high = RollingQuantile(HIGH, window)
        self.learnt = 0
        self.learnt_ns = 0  # when, the last time
        self.usual_ns = 0.0
        self.spread_ns = 0.0

    def learn(self, value_ns: float, now_ns: int) -> None:
        self._median.update(value_ns)
        self._high.update(value_ns)
        self.learnt += 1
        self.learnt_ns = now_ns
        self.usual_ns = self._median.get() or 0.0
        self.spread_ns = ((self._high.get() or 0.0) - self.usual_ns) / HIGH_SIGMAS
