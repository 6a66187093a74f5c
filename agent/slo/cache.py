"""Cache alerts: a hit ratio below a threshold for a time opens a circuit and triggers what the
file declares; above it again for as long, the circuit closes. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dsagent.agent.slo.window import SlidingCounts

S = 1_000_000_000
MIN_LOOKUPS = 10  # requests in the time; fewer say nothing of the cache


@dataclass(frozen=True, slots=True)
class CachePreset:
    below_ratio: float
    for_s: float
    action: str


# The mission's two: bypass to the source and set a circuit mark; local fallback with an
# asynchronous refresh.
CACHE_PRESETS = {
    "bypass": CachePreset(0.60, 180.0, "bypass"),
    "local_fallback": CachePreset(0.45, 300.0, "local_fallback"),
}


@dataclass(frozen=True, slots=True)
class CacheAlert:
    """One entry of the file's list `cache`."""

    name: str  # cache_name; `prefix` is the engine's prefix cache, by tokens
    action: str
    below_ratio: float
    for_s: float
    webhook: str | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CircuitChange:
    """The circuit opened (act) or closed (act no more)."""

    alert: CacheAlert
    is_open: bool
    hit_ratio: float
    since_ns: int


@dataclass(slots=True)
class Circuit:
    """Of one alert. It opens when the ratio over a time as long as `for_s` divided by 3, has been
    below the threshold for `for_s`, and closes likewise. No lookups change nothing: a cache that
    nobody asks has neither recovered nor failed."""

    alert: CacheAlert
    is_open: bool = False
    since_ns: int = 0  # of the state now
    hit_ratio: float | None = None
    _counts: SlidingCounts = field(init=False)
    _turned_ns: int | None = None
    _asked: deque[int] = field(default_factory=lambda: deque(maxlen=MIN_LOOKUPS))

    def __post_init__(self) -> None:
        self._counts = SlidingCounts(self.alert.for_s / 3)

    def add(self, hits: int, lookups: int, now_ns: int) -> None:
        """In tokens, or whatever the cache is asked for."""
        if lookups > 0:
            self._counts.add(now_ns, lookups, min(max(hits, 0), lookups))
            self._asked.append(now_ns)

    def judge(self, now_ns: int) -> CircuitChange | None:
        for_ns = round(self.alert.for_s * S)
        lookups, hits = self._counts.counts(now_ns)
        is_known = len(self._asked) == MIN_LOOKUPS and now_ns - self._asked[0] <= for_ns
        if not lookups or not is_known:
            self._turned_ns = None
            self.hit_ratio = None
            return None
        self.hit_ratio = hits / lookups
        if (self.hit_ratio < self.alert.below_ratio) == self.is_open:
            self._turned_ns = None
            return None
        if self._turned_ns is None:
            self._turned_ns = now_ns
        if now_ns - self._turned_ns < for_ns:
            return None
        self.is_open = not self.is_open
        self.since_ns, self._turned_ns = self._turned_ns, None
        return CircuitChange(self.alert, self.is_open, self.hit_ratio, self.since_ns)
