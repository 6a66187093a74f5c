"""Kernel facts kept by time, so that an interval's facts are found without looking at the rest."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dsagent.agent.facts import Facts, no_facts


class FactIndex:
    """One batch of facts, ordered by their end."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts[np.argsort(facts["end_ns"], kind="stable")]
        self._ends: npt.NDArray[np.int64] = np.ascontiguousarray(self.facts["end_ns"])
        starts: npt.NDArray[np.int64] = np.ascontiguousarray(self.facts["start_ns"])
        # No fact at or after i begins before this: lets a search stop early.
        self._least_start = np.minimum.accumulate(starts[::-1])[::-1]
        # Of all; of none, an interval that nothing overlaps.
        self.start_ns = int(self._least_start[0]) if len(facts) else 0
        self.end_ns = int(self._ends[-1]) if len(facts) else 0

    def __len__(self) -> int:
        return len(self.facts)

    def overlapping(self, start_ns: int, end_ns: int) -> Facts:
        low = int(self._ends.searchsorted(start_ns, "right"))
        high = int(self._least_start.searchsorted(end_ns, "left"))
        near = self.facts[low : max(low, high)]
        return near[near["start_ns"] < end_ns]


class FactRows:
    """Some columns of one batch of facts as tuples, the first two `start_ns` and `end_ns`, ordered
    by their end: where many small intervals are asked for, numpy's overhead would be most of it."""

    def __init__(self, facts: Facts, columns: Sequence[str]) -> None:
        self._rows: list[tuple[int, ...]] = []
        if len(facts):  # of a short interval there are often none
            order = np.argsort(facts["end_ns"], kind="stable")
            self._rows = facts[["start_ns", "end_ns", *columns]][order].tolist()
        self._ends = [row[1] for row in self._rows]
        least = itertools.accumulate((row[0] for row in reversed(self._rows)), min)
        self._least_start = list(least)[::-1]

    def overlapping(self, start_ns: int, end_ns: int) -> list[tuple[int, ...]]:
        low = bisect_right(self._ends, start_ns)
        high = bisect_left(self._least_start, end_ns)
        return [row for row in self._rows[low:high] if row[0] < end_ns]


class FactStore:
    """The batches of the last while, each indexed once, when it came."""

    def __init__(self) -> None:
        self._batches: deque[FactIndex] = deque()
        self._held = 0

    def __len__(self) -> int:
        return self._held

    def add(self, facts: Facts) -> None:
        if len(facts):
            self._batches.append(FactIndex(facts))
            self._held += len(facts)

    def overlapping(self, start_ns: int, end_ns: int) -> Facts:
        near = [
            found
            for batch in self._batches
            if batch.end_ns > start_ns
            and batch.start_ns < end_ns
            and len(found := batch.overlapping(start_ns, end_ns))
        ]
        if not near:
            return no_facts()
        return near[0] if len(near) == 1 else np.concatenate(near)

    def prune(self, keep_ns: int, most: int) -> int:
        """Drops batches that ended before `keep_ns`, and the oldest beyond `most` facts in all;
        returns how many facts went that were still within `keep_ns`."""
        given_up = 0
        while self._batches and (self._held > most or self._batches[0].end_ns < keep_ns):
            dropped = self._batches.popleft()
            self._held -= len(dropped)
            if dropped.end_ns >= keep_ns:
                given_up += len(dropped)
        return given_up
