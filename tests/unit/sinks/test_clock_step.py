"""The wall clock is stepped while the agent runs: what is accounted for stays as long as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import made
import pytest
from made import account, batch

from dsagent.agent.facts import ClockAnchor
from dsagent.agent.sinks.reader import read_accounts
from dsagent.agent.sinks.recording import RecordingSink

DAY_NS = 86_400 * 10**9


@pytest.mark.parametrize("step_ns", [-DAY_NS, DAY_NS, -400 * DAY_NS])
def test_a_step_of_the_wall_clock_moves_no_account(tmp_path: Path, step_ns: int) -> None:
    before, after = account("before"), account("after", start_ns=2001 * 10**9)
    anchor = made.ANCHOR
    stepped = ClockAnchor(anchor.mono_ns, anchor.unix_ns + step_ns, anchor.error_ns)
    sink = RecordingSink(tmp_path / "rec")
    sink.start()
    sink.take(batch(accounts=(before,)))
    sink.take(replace(batch(accounts=(after,)), anchor=stepped))
    sink.stop(10.0)
    assert sink.status().failed == sink.status().dropped == 0
    assert read_accounts(tmp_path / "rec") == [before, after]
