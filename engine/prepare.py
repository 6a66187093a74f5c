"""From a plan to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from .model import Batch, Chunk
from .scheduler import Work


def prepare(work: ListOf[Work], block_size: int, device: torch.device) -> Batch:
    """The batch for a plan's work, whose decodes come first."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    chunks: list[Chunk] = []
    for item in work:
        sequence, start, end = item.sequence, item.context, item.context + item.tokens
        first_row = len(token_ids)
        token_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        slots += (
            sequence.blocks[position // block_size] * block_size + position % block_size
            for position in range(start, end)
        )
        if item.samples:
            logit_rows.append(len(token_ids) - 1)
        if item.is_prefill:
            reached = sequence.blocks[: -(-end // block_size)]
            blocks = torch.tensor(reached, device=device)
            chunks.append(Chunk(first_row, len(token_ids), start, blocks))
    decodes = [item for item in work if not item.is_prefill]
    most = max((len(item.sequence.blocks) for item in decodes), default=0)
    tables = [_padded(item.sequence.blocks, most) for item in decodes]

    def tensor(values: ListOf[int] | ListOf[ListOf[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        decodes=len(decodes),
        decode_blocks=torch.tensor(tables, dtype=torch.int64, device=device).view(
            len(tables), most
        ),
        decode_lengths=tensor([item.context + 1 for item in decodes]),
        chunks=tuple(chunks),
        logit_rows=tensor(logit_rows),
    )


def _padded(blocks: list[int], length: int) -> list[int]:
    return blocks + blocks[-1:] * (length - len(blocks))
