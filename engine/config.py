"""The engine's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Raises ValueError where they contradict one another."""

    max_num_seqs: int = 16  # sequences that may run at once
    max_num_batched_tokens: int = 512  # tokens computed in one step: decodes, then prefill chunks
    block_size: int = 16  # tokens in one KV block
    num_kv_blocks: int | None = None  # None: as many as kv_cache_bytes holds
    kv_cache_bytes: int = 512 << 20
    max_model_len: int | None = None  # None: the model's own context length
    enable_prefix_cache: bool = True
    threads: int | None = None  # of torch; None: its default
    seed: int = 0  # for requests that bring none

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("num_kv_blocks", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must not be below max_num_seqs: "
                "every running sequence decodes one token a step"
            )
