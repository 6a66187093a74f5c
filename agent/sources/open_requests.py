"""The requests that have been opened and not closed, and the oldest of them."""

from __future__ import annotations

import heapq
from collections import deque

MOST_OPEN = 20_000
MOST_DROPPED = 64  # trace ids of those given up or forgotten


class OpenRequests:
    """By key, 20,000 at most: beyond that the oldest is given up, and counted."""

    def __init__(self) -> None:
        self._received: dict[int, tuple[int, int]] = {}  # when, and its trace id
        self._oldest_first: list[tuple[int, int]] = []  # (received_ns, key); some closed by now
        self.dropped_trace_ids = deque[int](maxlen=MOST_DROPPED)  # the last few
        self.given_up = 0

    @property
    def trace_ids(self) -> list[int]:
        """In the order in which they were read."""
        return [trace_id for _, trace_id in self._received.values()]

    def __len__(self) -> int:
        return len(self._received)

    def open(self, key: int, received_ns: int, trace_id: int) -> list[int]:
        """Returns the keys given up for it."""
        self._received[key] = received_ns, trace_id
        heapq.heappush(self._oldest_first, (received_ns, key))
        if len(self._oldest_first) > 2 * MOST_OPEN:  # long ago closed, behind one still open
            self._oldest_first = [(ns, key) for key, (ns, _) in self._received.items()]
            heapq.heapify(self._oldest_first)
        forgotten = []
        while len(self._received) > MOST_OPEN:
            forgotten.append(self._drop_oldest())
            self.given_up += 1
        return forgotten

    def close(self, key: int) -> None:
        self._received.pop(key, None)

    def oldest_ns(self) -> int | None:
        """When the oldest arrived; None where none is open."""
        while self._oldest_first:
            received_ns, key = self._oldest_first[0]
            if key in self._received and self._received[key][0] == received_ns:
                return received_ns
            heapq.heappop(self._oldest_first)
        return None

    def forget_before(self, moment_ns: int) -> list[int]:
        """Forgets those that arrived before; returns their keys."""
        forgotten = []
        while (oldest_ns := self.oldest_ns()) is not None and oldest_ns < moment_ns:
            forgotten.append(self._drop_oldest())
        return forgotten

    def _drop_oldest(self) -> int:
        self.oldest_ns()  # leaves it on top
        _, key = heapq.heappop(self._oldest_first)
        self.dropped_trace_ids.append(self._received.pop(key)[1])
        return key
