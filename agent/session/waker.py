"""Wakes a loop that waits in a selector."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Waker:
    """`wake` may come from any thread and from a signal handler, at any time: once closed, it
    does nothing, and never touches a descriptor that is another's by then."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A signal handler may interrupt the thread that holds it.
        self._lock = threading.RLock()
        self._open = True

    def wake(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self.fd, 1)

    def take(self) -> None:
        """It is not ready to be read any more, until woken again."""
        with self._lock, suppress(BlockingIOError):
            if self._open:
                os.eventfd_read(self.fd)

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)
