"""Stacks that a sampler saw running, and the reader of what py-spy writes of them. Pure.

Of py-spy's formats only the chrome trace says when a stack was seen, so that a sample can be tied
to the step that ran then. It says so when a thread's stack has changed: a stack seen twice in a
row is written once, and only the number of all samples tells how often that was
(`Recorded.repeats`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

MAX_EVENTS = 400_000
MAX_DEPTH = 256  # frames of one stack; the outermost go first
MAX_TEXT_CHARS = 240
MAX_THREADS = 1024

_THREAD = re.compile(
    r"thread \((?P<tid>0[xX][0-9A-Fa-f]{1,16}|[0-9]{1,10})\)(?:: (?P<name>.*))?", re.DOTALL
)
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_SAMPLES = re.compile(rb"Samples: ([0-9]{1,9})\b")


class NotATrace(ValueError):  # noqa: N818 - what it is, not what went wrong
    """What was read is not what py-spy writes."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a function; control characters escaped, texts bounded."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A thread that was running, not asleep. `tid`: the kernel's, None where it is not told.
    `frames`: the outermost first."""

    at_ns: int
    tid: int | None
    thread: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one run of the sampler brought. Each sample stands for `interval_ns` of a thread."""

    pid: int
    began_ns: int
    ended_ns: int
    interval_ns: int
    seen: tuple[Seen, ...]
    repeats: int = 0  # samples of a stack that the same thread had in the sample before
    damaged: int = 0  # samples that make no sense, not among the above
    kind: Literal["python", "native"] = "python"


def samples_told(said: bytes) -> int | None:
    """How many samples py-spy says it has taken; None where it does not."""
    found = _SAMPLES.search(said)
    return None if found is None else int(found[1])


class TraceReader:
    """Reads a chrome trace by py-spy event by event: its caller must not be kept long."""

    def __init__(self, text: bytes, began_ns: int, ended_ns: int) -> None:
        """`began_ns`: the trace's time 0. Raises NotATrace."""
        try:
            self._text = text.decode()
        except ValueError as error:
            raise NotATrace(f"no JSON: {str(error)[:80]}") from error
        self._reader = _Reader(began_ns, ended_ns)
        self._events = 0
        self.is_over = False
        self._at = self._past_space(0)
        if not self._text.startswith("[", self._at):
            raise NotATrace("no list of events")
        self._at = self._past_space(self._at + 1)
        if self._text.startswith("]", self._at):
            self._end()

    def read_event(self) -> None:
        """The next one, as long as it is not over. Raises NotATrace."""
        try:
            event, at = _DECODER.raw_decode(self._text, self._at)
        except (ValueError, RecursionError) as error:
            raise NotATrace(f"no JSON: {str(error)[:80]}") from error
        self._events += 1
        if self._events <= MAX_EVENTS:
            self._reader.take(event)
        self._at = self._past_space(at)
        if self._text.startswith("]", self._at):
            self._end()
        elif self._text.startswith(",", self._at):
            self._at = self._past_space(self._at + 1)
        else:
            raise NotATrace(f"no JSON: an event has no end at {self._at}")

    def _past_space(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return at if found is None else found.end()

    def _end(self) -> None:
        if self._past_space(self._at + 1) != len(self._text):
            raise NotATrace("no JSON: something follows it")
        self.is_over = True
        self._reader.flush()

    def result(self) -> tuple[list[Seen], int]:
        """Once it is over: the samples in the order of time, and how many made no sense."""
        self._reader.seen.sort(key=lambda seen: seen.at_ns)
        return self._reader.seen, self._reader.damaged + max(0, self._events - MAX_EVENTS)


class _Reader:
    """Plays the begins and ends of frames; what a thread has on its stack after all those of one
    moment is a sample."""

    def __init__(self, began_ns: int, ended_ns: int) -> None:
        self.seen: list[Seen] = []
        self.damaged = 0
        self._began_ns, self._ended_ns = began_ns, ended_ns
        self._stacks: dict[int, list[tuple[str, str, int]]] = {}
        self._frames: dict[tuple[str, str, int], Frame] = {}
        self._now: tuple[int, int] | None = None  # thread and microseconds

    def take(self, event: Any) -> None:
        match event:
            case {
                "ph": "B" | "E" as what,
                "name": str(name),
                "tid": int(thread),
                "ts": int(at_us),
                "args": {"filename": str(file), "line": int(line)},
            } if 0 <= at_us < 1 << 53 and 0 <= line < 1 << 31:
                if self._now != (thread, at_us):
                    self.flush()
                    self._now = (thread, at_us)
                self._play(thread, what, (name, file, line))
            case _:
                self.damaged += 1

    def _play(self, thread: int, what: str, frame: tuple[str, str, int]) -> None:
        if thread not in self._stacks and len(self._stacks) >= MAX_THREADS:
            self.damaged += 1
            return
        stack = self._stacks.setdefault(thread, [])
        if what == "B" and len(stack) < 4 * MAX_DEPTH:
            stack.append(frame)
        elif what == "E" and stack and stack[-1] == frame:
            stack.pop()
        else:  # one that never began, or deeper than any stack
            self.damaged += 1

    def flush(self) -> None:
        """The events of one moment are all there."""
        if self._now is None:
            return
        thread, at_us = self._now
        self._now = None
        at_ns = self._began_ns + 1000 * at_us
        stack = self._stacks.get(thread, [])
        tid, name = None, ""
        if stack and (found := _THREAD.fullmatch(stack[0][0])) is not None and not stack[0][1]:
            tid, name = int(found["tid"], 0), _clean(found["name"] or "")
            stack = stack[1:]
        if not stack:
            return  # it is over with this thread
        if at_ns > self._ended_ns:
            self.damaged += 1
            return
        frames = tuple(self._frame(frame) for frame in stack[-MAX_DEPTH:])
        self.seen.append(Seen(at_ns, tid, name, frames))

    def _frame(self, frame: tuple[str, str, int]) -> Frame:
        """One object for each, however often it is seen."""
        made = self._frames.get(frame)
        if made is None:
            function, file, line = frame
            made = self._frames[frame] = Frame(_clean(function) or "?", _clean(file), line)
        return made


def _clean(text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        text = text[: MAX_TEXT_CHARS - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
