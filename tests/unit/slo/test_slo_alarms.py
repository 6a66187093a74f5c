"""The simulation behind docs/slo.md's tables, a little of it."""

from __future__ import annotations

import pytest
from slo_alarms import delay, false_alarms


@pytest.mark.parametrize("slower", [1, 3])
@pytest.mark.parametrize("objective", [0.95, 0.99])
def test_at_five_requests_a_second_a_page_comes_within_18_seconds(
    objective: float, slower: int
) -> None:
    found = delay(objective, 5.0, slower, tries=3)
    assert found.worst_s is not None
    assert 0 < found.worst_s <= 18


def test_few_requests_are_no_evidence_for_a_long_time() -> None:
    assert delay(0.99, 0.01, 1, tries=1).worst_s is None


def test_a_service_that_keeps_to_its_objective_pages_nobody() -> None:
    found = false_alarms(0.99, 1.0, days=0.1)
    assert 8000 < found["requests"] < 9300
    assert found["page"] == 0
