"""The requests that have been opened and not closed, and the oldest of them."""

from __future__ import annotations

import heapq

MOST_OPEN = 20_000


class OpenRequests:
    """By key, 20,000 at most: beyond that the oldest is given up, and counted."""

    def __init__(self) -> None:
        self._received: dict[int, int] = {}
        self._oldest_first: list[tuple[int, int]] = []  # (received_ns, key); some closed by now
        self.given_up = 0

    def __len__(self) -> int:
        return len(self._received)

    def open(self, key: int, received_ns: int) -> list[int]:
        """Returns the keys given up for it."""
        self._received[key] = received_ns
        heapq.heappush(self._oldest_first, (received_ns, key))
        if len(self._oldest_first) > 2 * MOST_OPEN:  # long ago closed, behind one still open
            self._oldest_first = [(ns, key) for key, ns in self._received.items()]
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
            if self._received.get(key) == received_ns:
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
        del self._received[key]
        return key
