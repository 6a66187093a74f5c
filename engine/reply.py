"""How answers are written: OpenAI's JSON documents and server-sent events."""

from __future__ import annotations

import json
import time
from typing import Any

from .observe import RequestLife
from .protocol import ApiError

DONE = b"data: [DONE]\n\n"


class Reply:
    """Writes the answer to one request; `text` is UTF-8 text, never half a character."""

    __slots__ = ("_chat", "_created", "_first", "_include_usage", "_life")

    def __init__(self, life: RequestLife, *, include_usage: bool) -> None:
        self._life = life
        self._chat = life.operation == "chat"
        self._include_usage = include_usage
        self._created = int(time.time())
        self._first = True

    def whole(self, text: str) -> bytes:
        """The one document of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["finish_reason"] = self._life.finish_reason
        kind = "chat.completion" if self._chat else "text_completion"
        return json.dumps(self._envelope(kind, [choice]) | {"usage": self._usage()}).encode()

    def piece(self, text: str) -> bytes:
        """An event with more text."""
        return self._event([self._choice(text, None)])

    def end(self, text: str) -> bytes:
        """The last events: the rest of the text, why it ended, the usage if asked for, [DONE]."""
        events = self.piece(text) if text else b""
        events += self._event([self._choice("", self._life.finish_reason)])
        if self._include_usage:
            events += self._event([], self._usage())
        return events + DONE

    def failure(self, error: ApiError) -> bytes:
        """The last event of an answer that failed after its beginning was out."""
        return b"data: " + error.body() + b"\n\n"

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            delta: dict[str, str] = {"content": text} if text or finish_reason is None else {}
            if self._first:
                delta["role"] = "assistant"
            choice["delta"] = delta
        else:
            choice["text"] = text
        self._first = False
        return choice | {"logprobs": None, "finish_reason": finish_reason}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        document = self._envelope(
            "chat.completion.chunk" if self._chat else "text_completion", choices
        )
        if self._include_usage:
            document["usage"] = usage
        return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._life.request_id,
            "object": kind,
            "created": self._created,
            "model": self._life.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        prompt_tokens = self._life.prompt_tokens or 0
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._life.output_tokens,
            "total_tokens": prompt_tokens + self._life.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._life.cached_tokens},
        }
