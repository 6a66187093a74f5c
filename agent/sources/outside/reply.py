"""What a reply says besides its text. Pure.

Server-sent events are counted as their lines are complete; of a line no more
than `MOST_LINE_BYTES` is looked at, and nothing of it is kept but numbers, the
reply's id, the model's name and the reason it ended.
"""

from __future__ import annotations

import re

MOST_LINE_BYTES = 4096
DONE = b"[DONE]"

_ID = re.compile(rb'"id":\s*"((?:chatcmpl|cmpl|gen|resp)[!#-\[\]-~]{1,120})"')
_MODEL = re.compile(rb'"model":\s*"([^"\\]{1,256})"')
_REASON = re.compile(rb'"(?:finish_reason|stop_type)":\s*"([a-z_]{1,32})"')
# A piece of text that is not empty. A quotation mark inside a string is escaped, so what the model
# wrote cannot look like a key.
_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning|arguments|output)":\s*"[^"]')
_COUNT = re.compile(
    rb'"(prompt_tokens|completion_tokens|cached_tokens|tokens_evaluated|tokens_predicted'
    rb'|tokens_cached|prompt_n|predicted_n|cache_n)":\s*([0-9]{1,9})\b'
)
_PROMPT = ("prompt_tokens", "tokens_evaluated")
_COMPLETION = ("completion_tokens", "tokens_predicted", "predicted_n")
_CACHED = ("cached_tokens", "cache_n")


class Reply:
    """One body. `tokens`: pieces of text seen, each of which is held to be one token."""

    def __init__(self, *, events: bool) -> None:
        self._events = events  # text/event-stream
        self._line = bytearray()
        self._seen_bytes = 0
        self._counts: dict[str, int] = {}
        self.tokens = 0
        self.hidden_bytes = 0
        self.done = False
        self.reply_id = ""
        self.model = ""
        self.finish_reason = ""

    def feed(self, data: bytes, length: int) -> int:
        """Some of the body; returns how many tokens it brought to an end."""
        before = self.tokens
        at = 0
        while (end := data.find(b"\n", at)) >= 0 and self._events:
            self._add(data[at:end])
            self._line_over()
            at = end + 1
        self._add(data[at:])
        self._seen_bytes += len(data)
        if length > len(data):
            self.hidden_bytes += length - len(data)
            if self._events:
                self._line.clear()  # what comes next begins like an event, or says nothing
        return self.tokens - before

    def close(self) -> None:
        """The body has ended; one that is no event stream is one line."""
        if self._line:
            self._line_over()

    def _add(self, data: bytes) -> None:
        self._line += data[: MOST_LINE_BYTES - len(self._line)]

    def _line_over(self) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._events:
            if not line.startswith(b"data:"):
                return
            if line[5:].strip() == DONE:
                self.done = True
                return
            self.tokens += _TEXT.search(line) is not None
        self._read(line)

    def _read(self, line: bytes) -> None:
        self.reply_id = self.reply_id or _first(_ID, line)
        self.model = self.model or _first(_MODEL, line)
        self.finish_reason = _first(_REASON, line) or self.finish_reason
        for key, number in _COUNT.findall(line):
            self._counts[key.decode()] = int(number)

    @property
    def hidden_tokens(self) -> int:
        """Pieces of text that must have been in what was not seen."""
        if not self._events or not self._seen_bytes:
            return 0
        return round(self.hidden_bytes * self.tokens / self._seen_bytes)

    def _count(self, names: tuple[str, ...]) -> int | None:
        return next((self._counts[name] for name in names if name in self._counts), None)

    @property
    def prompt_tokens(self) -> int | None:
        """As the server counts them, where it says so."""
        found = self._count(_PROMPT)
        if found is None and "prompt_n" in self._counts:
            return self._counts["prompt_n"] + self._counts.get("cache_n", 0)
        return found

    @property
    def completion_tokens(self) -> int | None:
        return self._count(_COMPLETION)

    @property
    def cached_tokens(self) -> int | None:
        return self._count(_CACHED)


def _first(pattern: re.Pattern[bytes], line: bytes) -> str:
    found = pattern.search(line)
    return found.group(1).decode("utf-8", "replace") if found else ""
