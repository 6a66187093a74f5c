"""Intervals that have not ended yet, told piece by piece.

A stop that lasts is worth knowing before it is over. So the part of an open
interval that lies behind us is handed out as exact pieces [a, b), [b, c), …;
when the kernel reports the whole interval at its end, the part already told
is cut off. No nanosecond is told twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsagent.agent.facts import Facts

# Who has the interval (a thread's tid, or ~cpu for a foreign task's run), and when it began.
Key = tuple[int, int]

_POLLS_UNTIL_LOST = 3


@dataclass(slots=True)
class _Told:
    until_ns: int
    unseen: int = 0  # polls since it was last found open


class OpenIntervals:
    """What has been told of the intervals that were open when last looked at."""

    def __init__(self) -> None:
        self._told: dict[Key, _Told] = {}

    def told_until(self, key: Key) -> int:
        """Where the next piece begins."""
        told = self._told.get(key)
        return key[1] if told is None else told.until_ns

    def tell(self, key: Key, until_ns: int) -> None:
        self._told[key] = _Told(until_ns)

    def trim(self, ended: Facts, owners: list[int]) -> Facts:
        """Cut what was told off the intervals that ended; `owners` as in Key, one a fact."""
        if not self._told:
            return ended
        starts = {start_ns for _, start_ns in self._told}
        kept = [True] * len(ended)
        for n, start_ns in enumerate(ended["start_ns"].tolist()):
            if start_ns not in starts:
                continue
            told = self._told.pop((owners[n], start_ns), None)
            if told is None:
                continue
            fact = ended[n]
            if fact["end_ns"] <= told.until_ns:
                kept[n] = False
                continue
            fact["start_ns"] = told.until_ns
            fact["ns"] = fact["end_ns"] - told.until_ns
        return ended if all(kept) else ended[kept]

    def age(self) -> None:
        """Once a poll, before looking: drop what has not been open in the last polls (`tell` says
        so of all that is) and whose end never came, because the ring was full."""
        for key, told in list(self._told.items()):
            told.unseen += 1
            if told.unseen > _POLLS_UNTIL_LOST:
                del self._told[key]
