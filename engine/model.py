"""What every model offers the engine.

The model owns the layout of its KV cache: the engine deals in blocks of
`block_size` token slots, numbered alike in all layers, and never looks inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = Callable[[str], Tensor]
"""A weight by its Hugging Face name, read when asked for; raises KeyError."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several new tokens of one sequence: rows [start, end) of the batch."""

    start: int
    end: int
    context: int  # tokens of the sequence in the cache before this step
    blocks: Tensor  # int64 [ceil((context + end - start) / block_size)]


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: `decodes` sequences with one new token each, then prefill chunks."""

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]: where each new token's KV goes, block * block_size + offset
    decodes: int
    decode_blocks: Tensor  # int64 [decodes, most blocks]; short rows repeat a block of their own
    decode_lengths: Tensor  # int64 [decodes]: tokens to attend to, the new one included
    chunks: tuple[Chunk, ...]
    logit_rows: Tensor  # int64: the rows whose logits are wanted


class Model(ABC):
    """A decoder with its weights."""

    vocab_size: int
    context_length: int
    device: torch.device

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """What one token slot costs in all layers."""

    @abstractmethod
    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Makes room for the KV cache; called once, before the first forward."""

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Writes the new tokens' KV and returns float32 logits [len(logit_rows), vocab_size]."""
