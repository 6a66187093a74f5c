"""From token ids back to text, token by token, and the strings that end it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns tokens into text as they come.

    A character whose bytes are spread over several tokens comes out whole,
    with the last of them. The pieces, with `finish()`, add up to the decoding
    of all bytes at once.
    """

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes`: what each id stands for; special tokens stand for nothing."""
        self._token_bytes = token_bytes
        self._decoder = _utf8_decoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        table = self._token_bytes
        # A model's output layer may be padded beyond its vocabulary.
        data = b"".join([table[index] for index in token_ids if index < len(table)])
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What a character that never became whole leaves behind: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Looks for the strings that end a text that arrives in pieces.

    The stop string that is complete first wins (of several ending at the same
    place, the longest), wherever the pieces are cut. Text that may be the
    beginning of one is held back; neither it nor anything after it comes out.
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that may go out now; sets `stopped` where a stop string is complete."""
        if not self._stops:
            return piece
        if self.stopped:
            return ""
        text = self._held + piece
        # The first to end wins, and of these the first to begin.
        found = [(start + len(s), start) for s in self._stops if (start := text.find(s)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        out = len(text) - self._may_begin(text)
        self._held = text[out:]
        return text[:out]

    def finish(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        begins = (
            length
            for stop in self._stops
            for length in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:length])
        )
        return max(begins, default=0)
