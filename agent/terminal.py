"""Between a command and the terminal: signals, the progress line, JSON or text at the end."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dsagent.agent.session import Live

Document = Mapping[str, Any]


def put_json(document: Document) -> None:
    """The result on stdout, as one JSON document."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def put_text(text: RenderableType) -> None:
    """The result on stdout, for people; without the blanks that pad tables where it is piped."""
    from dsagent.agent.render import console

    out = console()
    if sys.stdout.isatty():
        out.print(text)
    else:
        with out.capture() as capture:
            out.print(text)
        for line in capture.get().splitlines():
            print(line.rstrip())
    sys.stdout.flush()


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `stop`; a second Ctrl-C interrupts whatever still runs."""

    def on_signal(signum: int, _frame: object) -> None:
        signal.signal(signum, signal.default_int_handler)
        stop()

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Stopper:
    """What a signal does: interrupts at first, and ends in order once there is something to end."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None

    def then(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def __call__(self) -> None:
        if self._stop is None:
            raise KeyboardInterrupt
        self._stop()


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
        print(line, file=sys.stderr, flush=True)

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
        sys.stderr.write(f"\r\x1b[K{line[:78]}")
        sys.stderr.flush()
        self._shown = True

    def _clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False
