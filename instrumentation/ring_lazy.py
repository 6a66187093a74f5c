"""A ring made by the thread that first writes it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dsagent.instrumentation.ring_writer import RingWriter

_RING_ATTEMPTS = 3  # at making a ring
_ring_log = logging.getLogger("dsagent")


class LazyRing:
    """Given up after a few vain attempts; `failures` counts those of whoever feeds it."""

    def __init__(self, make: Callable[[], RingWriter]) -> None:
        self._make = make
        self._writer: RingWriter | None = None
        self._attempts_left = _RING_ATTEMPTS
        self.failures = 0

    def get(self) -> RingWriter | None:
        """None where there is none to be had, or it has switched itself off: nothing to do."""
        if self._writer is None and self._attempts_left:
            self._attempts_left -= 1
            try:
                self._writer = self._make()
            except OSError as error:
                _ring_log.warning("no step ring (%s): an agent will not see this engine", error)
        writer = self._writer  # another thread may close it meanwhile
        return writer if writer is None or writer.is_on else None

    def count_unwritten(self, records: int = 1) -> None:
        """What `get` gave nothing to write them into: a switched-off ring's header counts on."""
        writer = self._writer
        if writer is not None:
            writer.count_unwritten(records)

    def count_failure(self) -> None:
        """Something went wrong in what feeds it, and was kept from the engine."""
        self.failures += 1
        writer = self._writer
        if writer is not None:
            writer.count_failure()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._attempts_left = 0
