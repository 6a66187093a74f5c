"""The accounts of all engines, of those that have ended too: 10 minutes, one bound for them all."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dsagent.agent.session.ledger import MAX_BYTES, Ledger
from dsagent.agent.sidecar.processes import Key

MAX_ENDED = 64  # engines that have ended: one that restarts all the time must not fill the memory
PLACE = "what the sidecar keeps (the last 10 minutes, 32 MiB at most for all engines)"


@dataclass(frozen=True, slots=True)
class Book:
    """The accounts of one process."""

    key: Key
    ledger: Ledger


class Books:
    """The ledgers of engines that are watched belong to their threads: only the bound is set from
    here. Those that have ended belong to the caller's thread."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._live: dict[Key, Ledger] = {}
        self._ended: deque[Book] = deque()

    @property
    def ended(self) -> tuple[Book, ...]:
        return tuple(self._ended)

    def open(self, key: Key) -> Ledger:
        ledger = Ledger(place=PLACE)
        self._live[key] = ledger
        self._share()
        return ledger

    def close(self, key: Key, now_ns: int) -> None:
        """The engine has ended, or is attached to anew: its accounts stay for their time."""
        ledger = self._live.pop(key, None)
        if ledger is not None and len(ledger):
            self._ended.append(Book(key, ledger))
        self.expire(now_ns)

    def expire(self, now_ns: int) -> None:
        for book in self._ended:
            book.ledger.expire(now_ns)
        self._ended = deque(book for book in self._ended if len(book.ledger))
        while len(self._ended) > MAX_ENDED:
            self._ended.popleft()
        self._share()

    def limit(self, max_bytes: int) -> None:
        """Another bound from now on."""
        self.max_bytes = max_bytes
        self._share()

    @property
    def nbytes(self) -> int:
        return self.ended_bytes + sum(ledger.nbytes for ledger in tuple(self._live.values()))

    @property
    def ended_bytes(self) -> int:
        return sum(book.ledger.nbytes for book in self._ended)

    @property
    def accounts(self) -> int:
        ended = sum(len(book.ledger) for book in self._ended)
        return ended + sum(len(ledger) for ledger in tuple(self._live.values()))

    def _share(self) -> None:
        """Those that have ended give way first: they have half of it at most, and the others
        share what is left."""
        most_ended = self.max_bytes // 2 if self._live else self.max_bytes
        for book in self._ended:
            book.ledger.limit(max(0, most_ended - self.ended_bytes + book.ledger.nbytes))
        left = self.max_bytes - self.ended_bytes
        for ledger in tuple(self._live.values()):
            ledger.max_bytes = left // len(self._live)
