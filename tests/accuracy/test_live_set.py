"""Some faults of the laboratory on each change, with a seed that changes daily.

It fails only where a confidence bound lies beyond the floor: never because few requests
were unlucky.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tomllib

from campaign import Outcome, run  # isort: skip  # beside this file, as the others
from run import chosen, judged, today  # isort: skip
from score import Score, table, wilson  # isort: skip

pytestmark = [pytest.mark.ebpf, pytest.mark.smollm2]

FLOORS = tomllib.loads(Path(__file__).with_name("floors.toml").read_text())
SEED = int(os.environ.get("DSAGENT_LAB_SEED") or today())
BUDGET_S = 90


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    injectors = chosen(",".join(FLOORS["faults"]))
    return run(injectors, seed=SEED, budget_s=BUDGET_S, say=print)


@pytest.fixture(scope="module")
def result(outcome: Outcome) -> Score:
    found, not_run = judged(outcome, chosen(",".join(FLOORS["faults"])))
    print(f"seed {SEED}\n{table(found, not_run)}")
    return found


def test_the_agent_lost_nothing(outcome: Outcome) -> None:
    for summary in outcome.summaries:
        assert summary["uncounted_losses"] == 0
        assert summary["accounting_failures"] == 0


def test_the_top_cause_is_not_surely_below_the_floor(result: Score) -> None:
    right = sum(count.right for count in result.counts.values())
    affected = sum(count.affected for count in result.counts.values())
    assert affected >= 10, "the faults hurt hardly anybody"
    assert wilson(right, affected)[1] >= FLOORS["top1_ratio"], f"{right} of {affected}"


def test_the_culprit_is_not_surely_below_the_floor(result: Score) -> None:
    named = sum(count.named for count in result.counts.values())
    nameable = sum(count.nameable for count in result.counts.values())
    assert wilson(named, nameable)[1] >= FLOORS["culprit_ratio"], f"{named} of {nameable}"


def test_false_alarms_are_not_surely_above_the_ceiling(result: Score) -> None:
    alarms = sum(count.alarms for count in result.counts.values())
    unaffected = sum(count.unaffected for count in result.counts.values())
    assert wilson(alarms, unaffected)[0] <= FLOORS["false_alarm_ratio"], f"{alarms} of {unaffected}"


def test_more_than_half_of_the_sizes_are_not_surely_wrong(outcome: Outcome) -> None:
    errors = [error for case in outcome.cases if (error := case.size_error) is not None]
    within = sum(error <= FLOORS["size_error_p50"] for error in errors)
    assert wilson(within, len(errors))[1] >= 0.5, f"{within} of {len(errors)}"
