"""Between a command and the terminal: signals, the progress line, JSON or text at the end."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dsagent.agent import streams
from dsagent.agent.cli import leave_at_once

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dsagent.agent.session.report import Live

Document = Mapping[str, Any]


def put_json(document: Document) -> None:
    """The result on stdout, as one JSON document."""
    streams.put(json.dumps(document, indent=2) + "\n")


def put_text(text: RenderableType) -> None:
    """The result on stdout, for people; without the blanks that pad tables where it is piped."""
    from dsagent.agent.screens.render import page_of

    page = page_of(text)
    if not sys.stdout.isatty():
        page = "".join(f"{line.rstrip()}\n" for line in page.splitlines())
    streams.put(page)


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C and the first SIGTERM call `stop`; the second one of a kind, and any
    outside this block, ends the process at once."""

    def on_signal(signum: int, _frame: object) -> None:
        signal.signal(signum, leave_at_once)
        stop()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, on_signal)
    try:
        yield
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, leave_at_once)


def agrees(question: str) -> bool | None:
    """Whether the person at the terminal says yes; None where there is no person."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    streams.tell(f"{question} [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class Progress:
    """One line on stderr, rewritten in place on a terminal; elsewhere only what `say` says."""

    def __init__(self) -> None:
        self._alive = sys.stderr.isatty()
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clear()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._clear()
        streams.tell(f"{line}\n")

    def show(self, live: Live, more: str = "") -> None:
        if not self._alive:
            return
        troubled = [f"{each.name} {each.state}" for each in live.sources if each.state != "ok"]
        line = (
            f"{live.elapsed_s:.0f} s  {live.counts.requests} requests  {live.counts.steps} steps  "
            f"cost {live.overhead_ratio:.1%}"
        )
        for each in (more, ", ".join(troubled)):
            line += f"  {each}" if each else ""
        streams.tell(f"\r\x1b[K{line[:78]}")
        self._shown = True

    def _clear(self) -> None:
        if self._shown:
            streams.tell("\r\x1b[K")
            self._shown = False
