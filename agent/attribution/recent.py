"""The last numbers of a row, in order of size too: quantiles without sorting again. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable


class Recent:
    """The newest `most` numbers."""

    def __init__(self, most: int, numbers: Iterable[float] = ()) -> None:
        self._most = most
        self._in_time = deque(numbers)
        self._in_order = sorted(self._in_time)

    def __len__(self) -> int:
        return len(self._in_time)

    def append(self, number: float) -> None:
        if len(self._in_time) == self._most:
            del self._in_order[bisect_left(self._in_order, self._in_time.popleft())]
        self._in_time.append(number)
        insort(self._in_order, number)

    @property
    def median(self) -> float:
        """Raises IndexError where there is none."""
        middle, odd = divmod(len(self._in_order), 2)
        if odd:
            return self._in_order[middle]
        return (self._in_order[middle - 1] + self._in_order[middle]) / 2

    @property
    def lower_quartile(self) -> float:
        """The least that a quarter lie below; raises IndexError where there is none."""
        return self._in_order[len(self._in_order) // 4]
