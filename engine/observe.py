"""The only seam between the engine and whoever watches it.

The engine calls a `StepObserver` at fixed points and knows nothing more. The
default does nothing. An observer must not raise, block or keep references to
the lists it is handed; times are CLOCK_MONOTONIC nanoseconds
(`time.monotonic_ns`).

Two threads call it: the front end (HTTP) calls the `request_*` methods, the
engine's loop calls the `step_*` methods and `idle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class RequestLife:
    """One request from its first byte to its last; filled in as it goes. Absent is None."""

    request_id: str
    operation: str  # "chat" or "text_completion"
    model: str
    received_ns: int
    traceparent: str | None = None  # the header as it came, unvalidated
    external_id: str | None = None  # X-Request-Id as it came
    tenant: str | None = None
    tokenised_ns: int | None = None
    queued_ns: int | None = None
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None  # output time of the step that made it
    first_sent_ns: int | None = None  # first body byte with a token accepted by the socket
    finished_ns: int | None = None  # output time of the last step
    sent_ns: int | None = None  # last byte accepted by the socket, or the abort
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    finish_reason: str | None = None  # stop, length, abort
    error: str | None = None  # error.type, e.g. "client_disconnect", "invalid_request"


class StepShare(NamedTuple):
    """One request's part of one step."""

    request_id: str
    is_prefill: bool
    scheduled_tokens: int  # tokens of this request computed in this step
    cached_tokens: int  # of its prompt, found in the prefix cache when it was admitted in this step
    context_tokens: int  # tokens of it in the KV cache before this step
    output_tokens: int  # tokens handed out: 0 for a prefill chunk that is not the last
    is_recompute: bool  # it had computed these tokens before and was preempted


# Why the first waiting request was not admitted in a step.
ADMITTED, NO_PLACE, NO_KV_BLOCKS, NO_BUDGET = 0, 1, 2, 3


@dataclass(slots=True)
class StepReport:
    """One iteration of the loop. The phases follow one another from `start_ns`:
    schedule, prepare, forward, sample, output; what is left up to `end_ns` is the loop's own."""

    step_id: int
    start_ns: int
    end_ns: int  # the output time: when the step's tokens were handed to the front end
    schedule_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    output_ns: int
    prefill_tokens: int
    decode_tokens: int
    waiting: int  # requests not admitted after this step was scheduled
    running: int
    preempted: int  # requests preempted while scheduling this step
    kv_blocks_used: int
    kv_blocks_total: int
    admission: int  # ADMITTED, NO_PLACE, NO_KV_BLOCKS, NO_BUDGET
    graph: bool  # whether a captured CUDA graph ran
    shares: Sequence[StepShare] = field(default_factory=tuple)


class StepObserver:
    """Does nothing; subclasses watch."""

    def request_opened(self, life: RequestLife) -> None:
        """Front end: the body is read and the ids are known."""

    def request_closed(self, life: RequestLife) -> None:
        """Front end: the last byte is out, or the request was refused or aborted."""

    def step_started(self, step_id: int, start_ns: int) -> None:
        """Loop: a step begins; called before scheduling. `step_id` starts at 1."""

    def step_scheduled(self, prefill_tokens: int, decode_tokens: int) -> None:
        """Loop: what the step begun will compute is known, and is computed next."""

    def step_finished(self, step: StepReport) -> None:
        """Loop: the step's tokens have been handed out."""

    def idle(self) -> None:
        """Loop: nothing to run; about to wait for work."""

    def close(self) -> None:
        """The process ends."""
