"""Counts over a sliding window, in bounded memory. Pure."""

from __future__ import annotations

from collections import deque

S = 1_000_000_000
SLOTS = 30  # of a window; it forgets in steps of one of them


class SlidingCounts:
    """Events, and the bad ones among them, of the last `length_s` seconds (up to one slot more).
    Times are monotonic nanoseconds and never go back."""

    __slots__ = ("_bad", "_events", "_slot_ns", "_slots")

    def __init__(self, length_s: float) -> None:
        self._slot_ns = max(1, round(length_s * S / SLOTS))
        self._slots: deque[list[int]] = deque()  # number, events, bad; only those with events
        self._events = 0
        self._bad = 0

    def add(self, now_ns: int, events: int, bad: int) -> None:
        number = now_ns // self._slot_ns
        if not self._slots or self._slots[-1][0] < number:
            self._slots.append([number, 0, 0])
        self._slots[-1][1] += events
        self._slots[-1][2] += bad
        self._events += events
        self._bad += bad
        self._forget(number)

    def counts(self, now_ns: int) -> tuple[int, int]:
        """Events and bad ones."""
        self._forget(now_ns // self._slot_ns)
        return self._events, self._bad

    def _forget(self, number: int) -> None:
        while self._slots and self._slots[0][0] < number - SLOTS:
            _, events, bad = self._slots.popleft()
            self._events -= events
            self._bad -= bad
