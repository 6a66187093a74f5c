"""Speculative decoding in vLLM: how many of the drafted tokens were accepted, by position."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from dsagent.instrumentation.ring_lazy import LazyRing
from dsagent.instrumentation.tally import Tally, What
from dsagent.instrumentation.vllm_patch import AnyFunction, Hook

WRITE_NS = 2_000_000_000
_MOST_POSITIONS = 64
_PARAMETERS = (
    "spec_decoding_stats",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_invalid_spec_tokens",
    "request_id",
)


class DraftWatch:
    """Of one scheduler. Only its thread calls it, which also writes the ring."""

    def __init__(self, ring: LazyRing, engine_id: Callable[[], int]) -> None:
        """`engine_id()` says whose ring it is."""
        self._ring = ring
        self._engine_id = engine_id
        self._drafts = 0
        self._accepted: list[int] = []
        self._since_ns = 0

    def hooks(self) -> tuple[Hook, ...]:
        """It is called for each request of a step that had drafts, whether vLLM counts or not."""
        scheduler = "vllm.v1.core.sched.scheduler"
        return (Hook(scheduler, "Scheduler", "make_spec_decoding_stats", self.wrap_stats),)

    def wrap_stats(self, original: AnyFunction) -> AnyFunction:
        def make_spec_decoding_stats(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scheduler, *args, **kwargs)
            try:
                given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
                invalid = given.get("num_invalid_spec_tokens") or {}
                drafted = given["num_draft_tokens"] - invalid.get(given.get("request_id"), 0)
                self._observe(drafted, given["num_accepted_tokens"])
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self._ring.count_failure()
            return result

        return make_spec_decoding_stats

    def _observe(self, drafted: int, accepted: int) -> None:
        if drafted <= 0:
            return
        self._drafts += 1
        places = min(max(drafted, accepted), _MOST_POSITIONS)
        if places > len(self._accepted):
            self._accepted += [0] * (places - len(self._accepted))
        for place in range(min(accepted, places)):
            self._accepted[place] += 1
        now_ns = monotonic_ns()
        if not self._since_ns:
            self._since_ns = now_ns
        if now_ns - self._since_ns > WRITE_NS:
            self._write(now_ns)

    def _write(self, now_ns: int) -> None:
        writer = self._ring.get()
        if writer is None:
            self._ring.count_unwritten()
        else:
            writer.write(
                Tally(
                    engine_id=self._engine_id(),
                    pid=os.getpid(),
                    what=What.DRAFTS_ACCEPTED,
                    index=0,
                    rank=0,
                    start_ns=self._since_ns,
                    end_ns=now_ns,
                    label="",
                    counts=(self._drafts, *self._accepted),
                )
            )
        self._since_ns = now_ns
        self._drafts = 0
        self._accepted = [0] * len(self._accepted)

    def close(self) -> None:
        self._accepted = []
