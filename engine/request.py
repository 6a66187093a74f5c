"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestRefused(ValueError):  # noqa: N818
    """The request can never run here; the text is for the client."""


class EngineStopped(RuntimeError):  # noqa: N818
    """The engine takes no more requests: it is stopping, or its loop has failed."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Raises RequestRefused for values out of range."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestRefused("max_tokens must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestRefused("temperature must be a number not below 0")
        if not 0 < self.top_p <= 1:
            raise RequestRefused("top_p must be above 0 and at most 1")


class TokenOutput(NamedTuple):
    """What one step made for one request.

    `token_ids` are the new ones only; the end-of-sequence token, where it came,
    is the last of them. `finish_reason` is None while the request goes on.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    output_ns: int  # CLOCK_MONOTONIC, just before the hand-over
    first_scheduled_ns: int  # start of the step that admitted it; 0 if it never was
    cached_tokens: int  # of its prompt, found in the prefix cache on first admission
    error: str | None  # with finish_reason "error"
