"""Work that other threads ask of a thread which waits in a selector."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from dsagent.agent.session.waker import Waker

T = TypeVar("T")


class Calls:
    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def ask(self, work: Callable[[], T], timeout_s: float) -> T:
        """What came of it. From another thread only. Raises what `work` does, and TimeoutError."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                result.set_exception(error)

        self._waiting.put(run)
        self._waker.wake()
        return result.result(timeout_s)

    @property
    def are_there(self) -> bool:
        return not self._waiting.empty()

    def do(self) -> None:
        """All there are, in the thread that they are asked of."""
        while self.are_there:
            self._waiting.get()()
