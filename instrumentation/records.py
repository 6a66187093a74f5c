"""What an engine says of itself: steps, shares of steps, requests.

All times are CLOCK_MONOTONIC nanoseconds. Absent is None, never 0. These
types are what the rings carry (ring.py) and what spans are made of (spans.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """What a request does in a step."""

    PREFILL = 0
    DECODE = 1


class Admission(IntEnum):
    """Why the first waiting request was not admitted in a step."""

    ADMITTED = 0  # nobody was left waiting
    NO_PLACE = 1  # the limit on running sequences
    NO_KV_BLOCKS = 2
    NO_BUDGET = 3  # the step's token budget went to others


class Share(NamedTuple):
    """One request's part of one step. There are many a step, and a frozen dataclass takes twice as
    long to make."""

    request_key: int
    phase: Phase
    scheduled_tokens: int
    cached_tokens: int
    context_tokens: int
    output_tokens: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of the engine's loop in which something was scheduled.

    The durations follow one another from `start_ns` in the order schedule,
    prepare, forward, sample, output; `end_ns` is the output time.
    """

    engine_id: int
    step_id: int
    pid: int
    tid: int
    start_ns: int
    end_ns: int
    schedule_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    output_ns: int
    prefill_tokens: int
    decode_tokens: int
    waiting: int
    running: int
    preempted: int
    kv_blocks_used: int
    kv_blocks_total: int
    admission: Admission
    graph: bool
    shares: tuple[Share, ...]
    shares_omitted: int = 0  # beyond the 1,024 that are written
    inferred: bool = False  # nobody told it: made from what could be seen from outside

    @property
    def forward_start_ns(self) -> int:
        return self.start_ns + self.schedule_ns + self.prepare_ns

    @property
    def forward_end_ns(self) -> int:
        return self.forward_start_ns + self.forward_ns


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one worker rank did for a step."""

    engine_id: int
    step_id: int
    rank: int
    pid: int
    tid: int
    start_ns: int
    end_ns: int
    device_ns: int | None = None


@dataclass(frozen=True, slots=True)
class RequestOpen:
    """A request has been read by the front end."""

    request_key: int
    request_id: str
    trace_id: int  # 128 bits; made up by the front end where none came
    span_id: int  # 64 bits: the id of the request's own SERVER span
    parent_span_id: int | None
    sampled: bool | None  # the incoming flag; None without context
    received_ns: int
    pid: int
    tid: int
    inferred: bool = False  # seen from outside


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended; complete, so that a late reader needs no RequestOpen."""

    request_key: int
    request_id: str
    trace_id: int
    span_id: int
    parent_span_id: int | None
    sampled: bool | None
    operation: str  # "chat" or "text_completion"
    model: str
    tenant: str | None
    external_id: str | None  # X-Request-Id
    pid: int
    tid: int  # the front end's thread
    received_ns: int
    tokenised_ns: int | None
    queued_ns: int | None
    first_scheduled_ns: int | None
    first_token_ns: int | None
    first_sent_ns: int | None
    finished_ns: int | None
    sent_ns: int
    prompt_tokens: int | None
    output_tokens: int
    cached_tokens: int | None  # of the prompt, found in the cache; None: nobody told
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    finish_reason: str | None
    error: str | None
    self_exported: bool = False  # the engine's process exports its spans itself
    inferred: bool = False  # seen from outside: ids, times and counts are those of its messages

    @property
    def e2e_ns(self) -> int:
        return self.sent_ns - self.received_ns

    @property
    def ttft_ns(self) -> int | None:
        """From received to the first token's first byte; None if it never came."""
        return None if self.first_sent_ns is None else self.first_sent_ns - self.received_ns

    @property
    def tpot_ns(self) -> float | None:
        """(e2e − TTFT) / (output tokens − 1); None for one-token replies and for those sent whole,
        which tell nothing of the time between tokens."""
        ttft_ns = self.ttft_ns
        if ttft_ns is None or self.output_tokens <= 1 or ttft_ns >= self.e2e_ns:
            return None
        return (self.e2e_ns - ttft_ns) / (self.output_tokens - 1)


def request_key(request_id: str) -> int:
    """8 bytes of a hash of the engine's own request id: alike in every process, never 0."""
    digest = hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
