"""A recording of the recorded facts is attributed anew to the accounts that were made live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from made import ANCHOR, TARGET, step

from dsagent.agent.again import attribute_again
from dsagent.agent.attribution.account import Account
from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.errors import DsagentError
from dsagent.agent.sinks.base import Explained
from dsagent.agent.sinks.history import read_runs
from dsagent.agent.sinks.recording import RecordingSink
from dsagent.instrumentation.records import RequestOpen

from replay import _readings, recorded  # isort: skip  # of the laboratory


Change = Callable[[Accountant, int], None]


def record_live(
    directory: Path, *, without: str = "", changes: Mapping[int, Change] = MappingProxyType({})
) -> list[Account]:
    """The accounts made poll by poll, with all that came recorded beside. `changes`: of what is
    looked at, by the number of the poll after which they come."""
    lines = recorded()
    attached_ns = next(lines)["attached_ns"]
    accountant = Accountant(attached_ns)
    if without:
        accountant.source_off(without)
    sink = RecordingSink(directory)
    sink.start()
    made: list[Account] = []
    for number, poll in enumerate(lines):
        now_ns, brought = poll["now_ns"], [_readings(each) for each in poll["readings"]]
        for readings in brought:
            accountant.add(readings)
        accounts = accountant.due(now_ns)
        view = accountant.view
        if change := changes.get(number):
            change(accountant, now_ns)
        made += accounts
        told = [r.facts_complete_ns for r in brought if r.facts_complete_ns is not None]
        facts = [readings.facts for readings in brought if len(readings.facts)]
        base = Explained(TARGET, ANCHOR, now_ns, attached_ns=attached_ns, due_ns=now_ns)
        sink.take(
            replace(
                base,
                facts_complete_ns=told[-1] if told else None,
                view=view,
                accounts=tuple(accounts),
                opened=tuple(each for readings in brought for each in readings.opened),
                steps=tuple(step for readings in brought for step in readings.steps),
                facts=facts[0] if facts else base.facts,
                names={n: name for readings in brought for n, name in readings.names.items()},
            )
        )
    sink.stop(30.0)
    assert sink.status().dropped == sink.status().failed == 0
    return made


def tables(directory: Path, name: str) -> list[Path]:
    """Of each segment: there is one for every ten seconds that the machine takes to record."""
    found = sorted(directory.glob(f"{name}-*.parquet"))
    assert found
    return found


@pytest.mark.parametrize("without", ["", "kernel"])
def test_a_recording_is_attributed_anew_as_it_was_live(tmp_path: Path, without: str) -> None:
    live = record_live(tmp_path / "rec", without=without)
    again = list(attribute_again(tmp_path / "rec"))
    assert len(again) == len(live) > 50
    for now, before in zip(again, live, strict=True):
        assert now == before


def test_a_change_of_what_is_looked_at_is_done_again_where_it_was(tmp_path: Path) -> None:
    def steps_down(accountant: Accountant, now_ns: int) -> None:
        accountant.looks_at_all_but(now_ns, ("faults", "irq"))

    def goes_off(accountant: Accountant, now_ns: int) -> None:
        accountant.looks_at_all_but(now_ns, ("kernel",))
        accountant.source_off("kernel")

    def comes_back(accountant: Accountant, now_ns: int) -> None:
        accountant.looks_at_all_but(now_ns, ())
        accountant.source_on("kernel")

    polls = sum(1 for _ in recorded()) - 1
    changes: dict[int, Change] = {
        polls // 4: steps_down,
        polls // 2: goes_off,
        polls * 3 // 4: comes_back,
    }
    live = record_live(tmp_path / "rec", changes=changes)
    assert len({account.not_looked_at for account in live}) >= 3
    assert list(attribute_again(tmp_path / "rec")) == live


def test_what_was_seen_from_outside_is_still_said_to_be(tmp_path: Path) -> None:
    sink = RecordingSink(tmp_path / "rec")
    sink.start()
    told_step, told = step(7), RequestOpen(1, "r", 1, 1, None, None, 10, 1, 1)
    opened = (replace(told, inferred=True), told)
    steps = (replace(told_step, inferred=True), told_step)
    sink.take(Explained(TARGET, ANCHOR, told_step.end_ns, opened=opened, steps=steps))
    sink.stop(30.0)
    (poll,) = next(read_runs(tmp_path / "rec")).polls
    assert poll.readings.opened == list(opened)
    assert poll.readings.steps == list(steps)


def test_a_segment_that_lost_a_table_is_left_out_and_told(tmp_path: Path) -> None:
    record_live(tmp_path / "rec")
    for segment in tables(tmp_path / "rec", "shares"):
        segment.write_bytes(b"PAR1 no more")
    with pytest.raises(DsagentError, match=r"shares-\d+\.parquet: not readable"):
        list(attribute_again(tmp_path / "rec"))


def test_a_table_of_another_segment_makes_no_sense(tmp_path: Path) -> None:
    record_live(tmp_path / "rec")
    for segment in tables(tmp_path / "rec", "steps"):
        segment.unlink()
    with pytest.raises(DsagentError, match="holds what cannot be"):
        list(attribute_again(tmp_path / "rec"))
