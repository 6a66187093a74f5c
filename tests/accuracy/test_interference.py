"""What the account says that a prefill cost the others, against a replay without that prefill.

The quick cases on each change; it fails only where most of them are surely wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomllib

from interference import FEW, in_process_of_its_own, section  # isort: skip  # beside this file
from run import today  # isort: skip
from score import wilson  # isort: skip

pytestmark = pytest.mark.smollm2

FLOORS = tomllib.loads(Path(__file__).with_name("floors.toml").read_text())


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    found = in_process_of_its_own("--few", "--seed", str(today()))
    print(section(found))
    return found


def test_more_than_half_of_the_savings_are_not_surely_mispredicted(found: dict[str, Any]) -> None:
    errors = [case["error"] for case in found["cases"] if case["error"] is not None]
    within = sum(error <= FLOORS["interference_error_p50"] for error in errors)
    assert wilson(within, len(errors))[1] >= 0.5, f"{within} of {len(errors)}: {errors}"


def test_every_prefill_is_charged_to_the_request_that_caused_it(found: dict[str, Any]) -> None:
    assert len(found["cases"]) == len(FEW)
    assert all(case["predicted_ns"] > 0 for case in found["cases"])


def test_who_waited_behind_a_prefill_would_have_been_let_in_at_once(found: dict[str, Any]) -> None:
    """Measured on both sides, so it agrees to what the two clocks' ends of it differ by: from
    the arrival to the step, and the host's work in the steps waited for."""
    assert found["queue_saving_ns"] > 0
    ratio = found["queue_saving_predicted_ns"] / found["queue_saving_ns"]
    assert 0.5 < ratio < 2, ratio
