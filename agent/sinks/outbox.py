"""What waits in memory to be posted: bounded in number and bytes, taken in bodies."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_ITEMS = 20_000
MAX_BYTES = 16 << 20
ITEMS_PER_BODY = 512
MAX_BODY_BYTES = 2 << 20  # gRPC servers refuse more than 4 MiB unless told otherwise
LINGER_S = 1.0  # how long the first item of a body waits for others


@dataclass(frozen=True, slots=True)
class Body:
    """An export request, serialised, and how many items it holds."""

    data: bytes
    items: int


class Feeder(Protocol):
    """Where bodies come from. One thread calls `next`, others the rest."""

    def next(self) -> Body | None:
        """Blocks until there is one; None once `end` was called and nothing is left."""

    def end(self) -> None: ...


class Outbox:
    """A feeder of items that are serialised already. One that does not fit is not taken."""

    def __init__(self, seal: Callable[[Sequence[bytes]], bytes]) -> None:
        """`seal`: makes a body of items."""
        self._seal = seal
        self._items: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_ending = False

    def put(self, items: Sequence[bytes]) -> int:
        """How many there was no room for."""
        with self._changed:
            refused = 0
            for item in items:
                is_full = len(self._items) >= MAX_ITEMS or self._bytes + len(item) > MAX_BYTES
                if is_full or self._is_ending:
                    refused += 1
                    continue
                self._items.append(item)
                self._bytes += len(item)
            if len(self._items) >= ITEMS_PER_BODY:
                self._changed.notify_all()
            return refused

    def next(self) -> Body | None:
        with self._changed:
            while not self._items and not self._is_ending:
                self._changed.wait(LINGER_S)
            if len(self._items) < ITEMS_PER_BODY and not self._is_ending:
                self._changed.wait(LINGER_S)
            taken: list[bytes] = []
            nbytes = 0
            while self._items and len(taken) < ITEMS_PER_BODY:
                if taken and nbytes + len(self._items[0]) > MAX_BODY_BYTES:
                    break
                taken.append(self._items.popleft())
                nbytes += len(taken[-1])
            self._bytes -= nbytes
        return Body(self._seal(taken), len(taken)) if taken else None

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    @property
    def waiting(self) -> tuple[int, int]:
        """Items and bytes."""
        with self._changed:
            return len(self._items), self._bytes


class Pulse:
    """A feeder that makes a body at every interval, and a last one at the end."""

    def __init__(self, make: Callable[[], Body | None], interval_s: float) -> None:
        """`make`: None where there is nothing yet."""
        self._make = make
        self._interval_s = interval_s
        self._due_s = time.monotonic() + interval_s
        self._ending = threading.Event()
        self._is_done = False

    def next(self) -> Body | None:
        while not self._is_done:
            self._is_done = self._ending.wait(max(0.0, self._due_s - time.monotonic()))
            self._due_s = time.monotonic() + self._interval_s
            body = self._make()
            if body is not None:
                return body
        return None

    def end(self) -> None:
        self._ending.set()


class BodyBox:
    """A feeder of bodies that came as they are, in their order; bounded in bytes."""

    def __init__(self) -> None:
        self._bodies: deque[Body] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_ending = False

    def put(self, body: Body) -> bool:
        """Whether there was room for it."""
        with self._changed:
            if self._is_ending or self._bytes + len(body.data) > MAX_BYTES:
                return False
            self._bodies.append(body)
            self._bytes += len(body.data)
            self._changed.notify_all()
            return True

    def next(self) -> Body | None:
        with self._changed:
            self._changed.wait_for(lambda: self._bodies or self._is_ending)
            if not self._bodies:
                return None
            body = self._bodies.popleft()
            self._bytes -= len(body.data)
            return body

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
