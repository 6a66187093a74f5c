"""What the sidecar says on stderr: one line each, for people or as JSON; never the same twice in a
row about the same thing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone

from dsagent.agent import streams
from dsagent.agent.host.procfs import escape

Field = str | int | list[str]
MAX_CHARS = 1000
MAX_TOPICS = 4096  # remembered; beyond, all is said again


class Log:
    """May be used from any thread."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        put: Callable[[str], None] = streams.tell,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.as_json = as_json
        self._put = put
        self._unix_s = unix_s
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], str] = {}
        self.repeated = 0  # lines that would have said what the last one said

    def say(self, event: str, message: str, *, about: str = "", **fields: Field) -> None:
        """`event`: a dotted name. `about`: what it is about; a message that was the last one of
        this event about that is not said again."""
        with self._lock:
            if self._last.get((event, about)) == message:
                self.repeated += 1
                return
            if len(self._last) >= MAX_TOPICS:
                self._last.clear()
            self._last[event, about] = message
            when = datetime.fromtimestamp(self._unix_s(), timezone.utc)
            stamp = when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            self._put(self._line(stamp, event, escape(message, MAX_CHARS), fields))

    def over(self, event: str, about: str = "") -> None:
        """What it said is no more so: the next time, it is said again."""
        with self._lock:
            self._last.pop((event, about), None)

    def _line(self, stamp: str, event: str, message: str, fields: dict[str, Field]) -> str:
        if self.as_json:
            document = {"time": stamp, "event": event, "message": message, **fields}
            return json.dumps(document) + "\n"
        return f"{stamp} {event} {message}\n"
