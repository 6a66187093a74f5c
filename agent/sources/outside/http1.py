"""HTTP/1.1 cut into heads and bodies, incrementally. Pure: bytes in, what they say out.

One `Messages` reads one direction of one connection. It is fed what each call
moved: the first bytes, which may be all, and how many there were. However the
bytes are split over calls, the outcome is the same; whatever they are, nothing
is raised and no more than `MOST_HEAD_BYTES` kept. Where what was not copied
hides where the next message begins, the reader is lost until a call begins
like a message again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

MOST_HEAD_BYTES = 32_768
MOST_LINE_BYTES = 256  # of a chunk's size, with its extensions
MOST_VALUE_BYTES = 512

_KEPT = frozenset(
    {
        "connection",
        "content-length",
        "content-type",
        "expect",
        "traceparent",
        "transfer-encoding",
        "x-request-id",
    }
)
_REQUEST = re.compile(rb"([A-Z]{1,16}) ([!-~]{1,8192}) HTTP/1\.([01])\r?")
_RESPONSE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?\r?")
_METHOD = re.compile(rb"(?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) ")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,12})[ \t]*(?:;[^\r\n]*)?\r?")

Side = Literal["request", "response"]
State = Literal["head", "body", "size", "chunk", "chunk end", "trailer", "to the end", "lost"]


@dataclass(frozen=True, slots=True)
class Head:
    """The first line, and those headers that matter here, their names in lower case."""

    method: str = ""
    path: str = ""
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True  # False: it was longer than what was copied of it


@dataclass(frozen=True, slots=True)
class Body:
    """Some of a body: the bytes that were copied, and how many there were in all."""

    data: bytes
    length: int


@dataclass(frozen=True, slots=True)
class End:
    """The message is complete."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What follows cannot be told apart; the message may or may not be complete."""


Event = Head | Body | End | Lost


class Messages:
    """One direction of a connection. `bodiless`: whether the next response has no body whatever
    its headers say (it answers HEAD)."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._state: State = "head"
        self._kept = bytearray()  # of a head, a chunk's size or a trailer that is not complete
        self._left = 0  # bytes of the body or the chunk still to come
        self._chunked = False
        self.bodiless = False

    def feed(self, data: bytes, length: int, tail: bytes = b"") -> Iterator[Event]:
        """What one call moved: its first bytes, how many it moved, and the last few of them."""
        length = max(length, len(data))
        if self._state == "lost":
            yield from self._find_again(data, tail)
        at = 0
        while at < len(data) and self._state != "lost":
            used, events = self._step(data, at)
            yield from events
            at += used
        missing = length - len(data)
        if missing and self._state != "lost":
            yield from self._skip(missing, tail)

    def close(self) -> Iterator[Event]:
        """The sender has ended the connection."""
        if self._state == "to the end":
            yield End()
        self._become("lost")

    def _become(self, state: State, left: int = 0) -> None:
        self._state, self._left = state, left
        self._kept.clear()

    def _step(self, data: bytes, at: int) -> tuple[int, list[Event]]:
        """Uses up some of data[at:]; returns how much, and what it meant."""
        match self._state:
            case "body" | "chunk":
                used = min(self._left, len(data) - at)
                self._left -= used
                events: list[Event] = [Body(data[at : at + used], used)]
                if not self._left:
                    events += self._part_over()
                return used, events
            case "to the end":
                return len(data) - at, [Body(data[at:], len(data) - at)]
            case "head":
                return self._head(data, at)
            case _:
                return self._line(data, at)

    def _part_over(self) -> list[Event]:
        if self._state == "chunk":
            self._become("chunk end")
            return []
        self._become("head")
        return [End()]

    def _head(self, data: bytes, at: int) -> tuple[int, list[Event]]:
        if not self._kept and data[at : at + 1] in (b"\r", b"\n"):
            return 1, []  # some put an empty line before a request
        before = len(self._kept)
        room = MOST_HEAD_BYTES - before
        self._kept += data[at : at + room]
        end = self._kept.find(b"\r\n\r\n", max(0, before - 3))
        if end < 0:
            used = len(data) - at
            if used > room:
                self._become("lost")
                return used, [Lost()]
            return used, []
        used = end + 4 - before
        head = bytes(self._kept[: end + 2])
        return used, self._begin(head)

    def _begin(self, text: bytes, *, whole: bool = True) -> list[Event]:
        head = parse_head(self._side, text, whole=whole)
        self._become("head")
        if head is None or not whole:
            self._become("lost")
            return [Lost()] if head is None else [head, Lost()]
        bodiless, self.bodiless = self.bodiless, False
        if head.status and (bodiless or head.status < 200 or head.status in (204, 304)):
            return [head, End()]
        return [head, *self._body(head)]

    def _body(self, head: Head) -> list[Event]:
        """What follows a head is told by its headers."""
        encoding = head.headers.get("transfer-encoding", "").lower()
        given = head.headers.get("content-length")
        self._chunked = encoding.split(",")[-1].strip() == "chunked"
        if self._chunked:
            self._become("size")
        elif given is not None:
            left = int(given) if re.fullmatch("[0-9]{1,15}", given) else -1
            if left > 0:
                self._become("body", left)
            else:
                return [End()] if left == 0 else self._lose()
        elif head.status:
            self._become("to the end")
        else:
            return [End()]
        return []

    def _lose(self) -> list[Event]:
        self._become("lost")
        return [Lost()]

    def _line(self, data: bytes, at: int) -> tuple[int, list[Event]]:
        """A chunk's size, the end of one, a trailer's line."""
        found = data.find(b"\n", at)
        until = len(data) if found < 0 else found + 1
        self._kept += data[at : min(until, at + MOST_LINE_BYTES + 2)]
        if len(self._kept) > MOST_LINE_BYTES and self._state != "trailer":
            self._become("lost")
            return until - at, [Lost()]
        if found < 0:
            del self._kept[MOST_LINE_BYTES:]
            return until - at, []
        return until - at, self._line_over(bytes(self._kept).rstrip(b"\n"))

    def _line_over(self, line: bytes) -> list[Event]:
        state = self._state
        if state == "trailer":
            self._kept.clear()
            if line in (b"", b"\r"):
                self._become("head")
                return [End()]
            return []
        if state == "chunk end" and line in (b"", b"\r"):
            self._become("size")
            return []
        size = _CHUNK.fullmatch(line) if state == "size" else None
        if size is None:
            self._become("lost")
            return [Lost()]
        left = int(size.group(1), 16)
        self._become("chunk" if left else "trailer", left)
        return []

    def _skip(self, missing: int, tail: bytes) -> Iterator[Event]:
        """Bytes that were not copied."""
        if self._state == "to the end":
            yield Body(b"", missing)
            return
        if self._state == "head" and self._kept:
            yield from self._begin(bytes(self._kept), whole=False)
            return
        chunked = self._state not in ("head", "body")
        hidden = min(missing, self._left)
        if hidden:
            yield Body(b"", hidden)
            self._left -= hidden
            missing -= hidden
            if not self._left:
                yield from self._part_over()
        if missing:
            self._become("lost")
            if chunked and tail.endswith(b"0\r\n\r\n"):
                self._become("head")
                yield End()
            else:
                yield Lost()

    def _find_again(self, data: bytes, tail: bytes) -> Iterator[Event]:
        """A call's first bytes are most often those of a message, or of a chunk."""
        begins = _METHOD.match(data) if self._side == "request" else data.startswith(b"HTTP/1.")
        if begins:
            self._become("head")
        elif self._side == "response" and (size := data.find(b"\r\n", 0, MOST_LINE_BYTES)) > 0:
            if self._chunked and _CHUNK.fullmatch(data[:size]):
                self._become("size")
        elif self._chunked and tail.endswith(b"0\r\n\r\n"):
            self._become("head")
            yield End()


def parse_head(side: Side, text: bytes, *, whole: bool = True) -> Head | None:
    """The head in `text` (without the empty line at its end); None where it is none."""
    lines = text.split(b"\n")
    if not whole:
        del lines[-1:]  # it may have been cut
    if not lines:
        return None
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        key = name.decode("latin-1").lower()
        if not colon or key not in _KEPT:
            continue
        shown = value.strip()[:MOST_VALUE_BYTES].decode("latin-1")
        if key in headers and key in ("content-length", "traceparent") and headers[key] != shown:
            shown = ""  # two that contradict each other: neither is believed
        headers[key] = shown
    if side == "request":
        found = _REQUEST.fullmatch(lines[0])
        if found is None:
            return None
        path = found.group(2).partition(b"?")[0].decode("ascii")
        return Head(method=found.group(1).decode(), path=path, headers=headers, whole=whole)
    found = _RESPONSE.fullmatch(lines[0])
    if found is None:
        return None
    return Head(status=int(found.group(2)), headers=headers, whole=whole)
