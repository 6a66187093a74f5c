"""The engine says what transformers says, however its work is cut, shared or repeated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import smollm2_reference as reference
from smollm2_reference import Answer

from dsagent.engine.config import EngineConfig
from dsagent.engine.loader import LoadedModel, load_model
from dsagent.engine.loop import Engine
from dsagent.engine.observe import StepObserver, StepReport
from dsagent.engine.request import SamplingParams, TokenOutput

pytestmark = pytest.mark.smollm2

GREEDY = SamplingParams(max_tokens=reference.NEW_TOKENS, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2", device="cpu")


class Steps(StepObserver):
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def step_finished(self, step: StepReport) -> None:
        self.reports.append(step)


def run(
    loaded: LoadedModel, answers: Iterable[Answer], steps: Steps, **settings: Any
) -> dict[str, list[int]]:
    """The tokens for each prompt, all submitted at once."""
    tokens: dict[str, list[int]] = {}

    def take(outputs: list[TokenOutput]) -> None:
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)

    engine = Engine(loaded, EngineConfig(**settings), observer=steps, on_outputs=take)
    for number, answer in enumerate(answers):
        engine.submit(str(number), answer.prompt_ids, GREEDY)
    while engine.step():
        pass
    return tokens


def test_greedy_is_transformers_greedy(smollm2: LoadedModel) -> None:
    answers = reference.stored()
    assert len(answers) >= 100
    tokens = run(smollm2, answers, Steps(), max_num_seqs=24)
    different = [a for n, a in enumerate(answers) if tokens[str(n)] != a.token_ids]
    for answer in different:
        print(f"diverges at a gap of {min(answer.gaps):.6f}: {answer.prompt[:60]!r}")
    wrong = [a.prompt for n, a in enumerate(answers) if not a.agrees(tokens[str(n)])]
    assert wrong == []
    assert len(different) <= 0.05 * len(answers)


def test_the_stored_answers_are_still_transformers_answers() -> None:
    model = reference.load()
    for stored in reference.stored()[3:100:19]:
        fresh = reference.answer(model, stored.prompt, stored.prompt_ids)
        assert stored.agrees(fresh.token_ids), stored.prompt
        assert fresh.gaps[0] == pytest.approx(stored.gaps[0], abs=1e-3)


def test_nothing_depends_on_chunks_cache_hits_or_preemption(smollm2: LoadedModel) -> None:
    answers = reference.stored()
    chosen = [*answers[4:60:14], answers[-1]]  # the last is longer than all of these budgets

    def check(name: str, tokens: dict[str, list[int]], order: list[Answer]) -> None:
        for number, answer in enumerate(order):
            assert answer.agrees(tokens[str(number)]), f"{name}: {answer.prompt[:60]!r}"

    check("one by one", run(smollm2, chosen, Steps(), max_num_seqs=1), chosen)

    check("small chunks", run(smollm2, chosen, Steps(), max_num_batched_tokens=37), chosen)

    steps = Steps()
    twice = [*chosen, *chosen]
    check("cache hits", run(smollm2, twice, steps, max_num_seqs=2), twice)
    assert sum(share.cached_tokens for step in steps.reports for share in step.shares) > 700

    steps = Steps()
    short = answers[:5]
    check("preemption", run(smollm2, short, steps, block_size=4, num_kv_blocks=16), short)
    assert sum(step.preempted for step in steps.reports) > 0
