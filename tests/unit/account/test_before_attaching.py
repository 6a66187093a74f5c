"""Steps from before the agent came teach the model nothing: nobody saw what delayed them."""

from __future__ import annotations

from made import step

from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.facts import Readings

MS = 1_000_000


def test_only_steps_since_attaching_teach_the_model() -> None:
    accountant = Accountant(attached_ns=10_000 * MS)
    accountant.source_off("kernel")
    steps = [step(1 + i, start_ns=9_000 * MS + i * 25 * MS) for i in range(80)]
    accountant.add(Readings(steps=steps))
    accountant.due(20_000 * MS)
    assert accountant.model.clean_steps == 40
