"""From logits to the next token."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from .request import SamplingParams
from .sequence import Sequence

# So many best tokens nearly always hold the probability that top_p asks for.
_LIKELY = 512


class NotANumber(ArithmeticError):  # noqa: N818
    """The model's logits hold NaN: nothing can be chosen."""


@torch.inference_mode()
def sample(logits: Tensor, sequences: ListOf[Sequence]) -> list[int | NotANumber]:
    """The next token of each sequence, one row of logits [sequences, vocabulary] each.

    A row's result depends on nothing but the row and its sequence's generator.
    """
    best, greedy = logits.max(dim=-1)
    chosen: list[int | NotANumber] = []
    for row, (sequence, is_nan, token) in enumerate(
        zip(sequences, best.isnan().tolist(), greedy.tolist(), strict=True)
    ):
        if is_nan:
            chosen.append(NotANumber("the model returned NaN"))
        elif sequence.generator is None:
            chosen.append(token)
        else:
            scaled = (logits[row] - best[row]) / sequence.sampling.temperature
            chosen.append(_draw(scaled.softmax(0), sequence.sampling.top_p, sequence.generator))
    return chosen


def generator(sampling: SamplingParams, seed: int) -> torch.Generator | None:
    """The request's own source of randomness; None where it is greedy."""
    if sampling.temperature == 0:
        return None
    # torch takes 64 bits; clients may send any integer.
    wanted = seed if sampling.seed is None else sampling.seed
    return torch.Generator().manual_seed(wanted % 2**63)


def _draw(probabilities: Tensor, top_p: float, source: torch.Generator) -> int:
    """One token from the fewest most likely ones whose probability adds up to `top_p`."""
    point = torch.rand((), dtype=torch.float64, generator=source).item()
    if top_p == 1:
        return _at(probabilities.cumsum(0, dtype=torch.float64), point)
    ordered, tokens = probabilities.topk(min(_LIKELY, len(probabilities)))
    cumulative = ordered.cumsum(0, dtype=torch.float64)
    if cumulative[-1] < top_p:
        ordered, tokens = probabilities.sort(descending=True)
        cumulative = ordered.cumsum(0, dtype=torch.float64)
    kept = int((cumulative < top_p).sum()) + 1
    return int(tokens[_at(cumulative[:kept], point)])


def _at(cumulative: Tensor, point: float) -> int:
    """The first index whose cumulative weight lies above `point`, a share of the whole."""
    index = torch.searchsorted(cumulative, cumulative[-1:] * point, right=True)
    return min(int(index), len(cumulative) - 1)
