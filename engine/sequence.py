"""A request as the scheduler sees it: its tokens, and how far they are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .request import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """One request from submission to its last token; belongs to the loop's thread."""

    request_id: str
    sampling: SamplingParams
    token_ids: list[int]  # the prompt, then what was generated
    prompt_tokens: int
    last_length: int  # tokens at which it ends, whatever it says
    generator: torch.Generator | None = None  # None: greedy
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose KV is in the cache
    prefill_until: int = 0  # tokens it had when it was admitted (again)
    remembered: int = 0  # of its blocks, how many the prefix cache knows
    serial: int = 0  # of the last of these
    recompute_until: int = 0  # tokens that had been computed before a preemption
    first_scheduled_ns: int = 0
    cached_tokens: int = 0  # of its prompt, found in the prefix cache on first admission

    @property
    def in_prefill(self) -> bool:
        return self.computed < self.prefill_until
