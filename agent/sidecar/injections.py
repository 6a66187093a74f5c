"""Hooks are put into each server by a thread of its own: one that does not come to run them (its
main thread is busy outside Python, or has no CPU) may take a minute, and keeps nobody waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dsagent.agent.errors import DsagentError
from dsagent.agent.session.guard import reason_of

MOST_AT_ONCE = 4
_Server = tuple[int, int]  # pid, and when it started


@dataclass(slots=True)
class _One:
    thread: threading.Thread
    why_not: str | None = None  # None as long as it is at it


class Injections:
    """All but the injecting itself in the sidecar's thread."""

    def __init__(self, say: Callable[[str], None], wake: Callable[[], None]) -> None:
        """`say` and `wake`: from any thread; `wake` when one is over."""
        self._say = say
        self._wake = wake
        self._running: dict[_Server, _One] = {}

    def outcome(self, pid: int, start_ticks: int) -> str | None:
        """None: not over yet, and begun if need be. Else why the hooks are not in, empty where
        they are; said once, then it would begin anew."""
        server = (pid, start_ticks)
        one = self._running.get(server)
        if one is not None:
            if one.why_not is not None:
                del self._running[server]
            return one.why_not
        self._forget_others_that_are_over()
        if len(self._running) < MOST_AT_ONCE:
            self._begin(server)
        return None

    def is_at_it(self, pid: int, start_ticks: int) -> bool:
        one = self._running.get((pid, start_ticks))
        return one is not None and one.why_not is None

    def _begin(self, server: _Server) -> None:
        def work() -> None:
            one.why_not = self._inject(server[0])
            self._wake()

        one = _One(threading.Thread(target=work, name=f"inject-{server[0]}", daemon=True))
        one.thread.start()
        self._running[server] = one

    def _inject(self, pid: int) -> str:
        from dsagent.agent.inject.way_in import inject

        try:
            inject(pid, self._say, None)
        except DsagentError as error:
            return str(error) or "it refused"
        except Exception as error:  # noqa: BLE001 - it can be seen from outside all the same
            return reason_of(error)
        return ""

    def _forget_others_that_are_over(self) -> None:
        """Nobody has asked what became of them: they have ended, or need no hooks any more."""
        for server, one in tuple(self._running.items()):
            if one.why_not is not None:
                del self._running[server]

    def join(self, deadline_s: float) -> None:
        """Until that time of time.monotonic(), at most. What is not over by then is let go as
        where this process is killed: the server goes on."""
        for one in self._running.values():
            one.thread.join(max(0.0, deadline_s - time.monotonic()))
