"""The clean-step model: it finds the price of a step back, through noise that only ever adds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from account_facts import share

from dsagent.agent.attribution.model import CleanStepModel, Shape, nonnegative_least_squares
from dsagent.instrumentation.records import Phase

MS = 1_000_000


def true_ns(item: Shape) -> float:
    """Bound by memory up to 8 tokens, by arithmetic beyond: no one price per token."""
    compute = max(0, item.tokens - 8) * 1.5 * MS
    return 40 * MS + compute + item.prefill_context * 100 + item.decode_context * 2000


def learnt(batches: tuple[int, int], prefills: bool) -> CleanStepModel:
    dice = random.Random(3)
    model = CleanStepModel()
    for _ in range(600):
        decodes = dice.randint(*batches)
        tokens = dice.randint(20, 500) if prefills and dice.random() < 0.2 else 0
        item = Shape(
            tokens + decodes,
            tokens * tokens // 2,
            decodes * dice.randint(20, 600),
            decodes + (tokens > 0),
        )
        model.observe(item, round(true_ns(item) * (1 + abs(dice.gauss(0, 0.05)))))
    return model


@pytest.mark.parametrize(
    "item",
    [
        Shape(1, 0, 300, 1),
        Shape(4, 0, 800, 4),
        Shape(8, 0, 2000, 8),
        Shape(100, 4600, 800, 5),
        Shape(400, 78000, 800, 5),
    ],
)
def test_it_finds_the_price_of_any_size(item: Shape) -> None:
    predicted = learnt((1, 8), prefills=True).predict_ns(item)
    assert predicted is not None
    assert 0.95 < predicted / true_ns(item) < 1.05


def test_where_only_full_batches_were_seen_the_step_itself_costs() -> None:
    """Reading the weights is what a small batch pays for; not a sixth of a batch of six."""
    alone = Shape(1, 0, 200, 1)
    predicted = learnt((5, 6), prefills=False).predict_ns(alone)
    assert predicted is not None
    assert 0.8 < predicted / true_ns(alone) < 1.3


def test_rare_long_prefills_outlive_many_decodes() -> None:
    model = learnt((1, 8), prefills=True)
    before = model.predict_ns(Shape(400, 80000, 0, 1))
    for _ in range(2000):
        item = Shape(4, 0, 800, 4)
        model.observe(item, round(true_ns(item)))
    after = model.predict_ns(Shape(400, 80000, 0, 1))
    assert before is not None
    assert after is not None
    assert abs(after - before) < 0.1 * before


def test_a_size_never_seen_has_no_price_and_few_steps_are_assumed() -> None:
    model = CleanStepModel()
    assert model.predict_ns(Shape(1, 0, 0, 1)) is None
    for _ in range(50):
        model.observe(Shape(1, 0, 100, 1), 20 * MS)
    price = model.price([share(1)])
    assert price.whole_ns is not None
    assert not price.fitted
    assert model.price([share(1, Phase.PREFILL, 400)]).whole_ns is None


def test_nonsense_teaches_nothing() -> None:
    model = CleanStepModel()
    model.observe(Shape(0, 0, 0, 0), 5)
    model.observe(Shape(1, 0, 0, 1), 0)
    assert model.clean_steps == 0


def test_coefficients_are_never_negative_and_solve_what_can_be_solved() -> None:
    dice = np.random.default_rng(1)
    matrix = np.hstack([np.ones((200, 1)), dice.random((200, 3))])
    true = np.array([2.0, 0.0, 3.0, 0.5])
    found = nonnegative_least_squares(matrix, matrix @ true, np.zeros(4))
    assert (found >= 0).all()
    assert np.abs(matrix @ found - matrix @ true).max() < 0.05
