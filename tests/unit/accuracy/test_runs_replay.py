"""Steps summed in runs are attributed as each alone is."""

from __future__ import annotations

import pytest

from dsagent.agent.attribution.runs import Runs

from replay import attributed, recorded  # isort: skip  # of the laboratory


def test_runs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    in_runs = attributed(recorded())
    found = 0

    def none(_self: Runs, first: int) -> int:
        nonlocal found
        found += 1
        return first

    monkeypatch.setattr(Runs, "end", none)
    assert attributed(recorded()) == in_runs
    assert found > 100
