from __future__ import annotations

from typing import Any

import pytest
import torch

from dsagent.engine.request import RequestRefused, SamplingParams
from dsagent.engine.sampler import NotANumber, generator, sample
from dsagent.engine.sequence import Sequence


def sequence(**settings: Any) -> Sequence:
    sampling = SamplingParams(**settings)
    return Sequence("r", sampling, [0], 1, 100, generator=generator(sampling, seed=0))


def draws(logits: torch.Tensor, count: int, **settings: Any) -> list[int]:
    one = sequence(**settings)
    drawn = [sample(logits[None], [one])[0] for _ in range(count)]
    return [token for token in drawn if isinstance(token, int)]


def test_temperature_zero_takes_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 4.9]])
    greedy = sequence(temperature=0)
    assert sample(logits, [greedy, greedy]) == [1, 0]


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, 5), []) == []


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    drawn = draws(logits, 2000, temperature=1, seed=7)
    assert abs(drawn.count(0) / 2000 - 0.5) < 0.05
    assert abs(drawn.count(2) / 2000 - 0.25) < 0.05


def test_temperature_sharpens_and_never_overflows() -> None:
    logits = torch.tensor([1.0, 0.0])
    assert set(draws(logits, 50, temperature=0.01, seed=1)) == {0}
    assert set(draws(logits, 50, temperature=1e-30, seed=1)) == {0}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = torch.tensor([0.1, 0.5, 0.3, 0.1]).log()
    assert set(draws(logits, 300, top_p=0.4, seed=3)) == {1}
    assert set(draws(logits, 300, top_p=0.7, seed=3)) == {1, 2}
    assert set(draws(logits, 300, top_p=0.999, seed=3)) == {0, 1, 2, 3}


def test_top_p_over_a_flat_distribution_looks_beyond_the_likely_ones() -> None:
    drawn = draws(torch.zeros(5000), 400, top_p=0.5, seed=5)
    assert len(set(drawn)) > 250
    assert len({*drawn, *draws(torch.zeros(5000), 4000, top_p=0.5, seed=6)}) <= 2501


def test_a_seed_repeats_whatever_stands_beside_it() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    alone = [sample(logits[1:2], [one])[0] for one in [sequence(seed=11)] for _ in range(5)]
    one, other = sequence(seed=11), sequence(seed=12)
    beside = [sample(logits, [other, one, other])[1] for _ in range(5)]
    assert alone == beside


def test_any_integer_is_a_seed() -> None:
    for seed in (-1, 2**64, -(2**70)):
        assert draws(torch.zeros(3), 1, seed=seed)


def test_nan_fails_its_own_row_only() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    broken, fine = sample(logits, [sequence(temperature=0), sequence(temperature=0)])
    assert isinstance(broken, NotANumber)
    assert fine == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused):
        SamplingParams(**settings)
