"""What sinks have to tell, told once: an event for the others, a line for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsagent.agent.facts import Event
from dsagent.agent.sinks.base import SinkStatus

MAX_NOTICES = 20  # of all sinks: one that words each anew must not fill the screen


class SinkNews:
    """Of one attachment. `tell` gets the line for people."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._ended: set[str] = set()
        self._notices: set[tuple[str, str]] = set()

    def of(self, sinks: Sequence[SinkStatus], now_ns: int) -> list[Event]:
        """Of each sink that takes no more, and of each notice that is new."""
        events = []
        for status in sinks:
            notice = (status.name, status.notice)
            is_new = status.notice and notice not in self._notices
            if is_new and len(self._notices) < MAX_NOTICES:
                self._notices.add(notice)
                events.append(
                    self._event("sink.notice", now_ns, f"sink {status.name}: {status.notice}")
                )
            if status.ended and status.name not in self._ended:
                self._ended.add(status.name)
                message = f"sink {status.name} takes no more: {status.reason}"
                events.append(self._event("sink.ended", now_ns, message))
        return events

    def _event(self, name: str, now_ns: int, message: str) -> Event:
        self._tell(message)
        return Event(name, now_ns, message)
