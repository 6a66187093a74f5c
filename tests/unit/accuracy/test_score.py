"""The table from judged requests, by hand-made ones."""

from __future__ import annotations

import pytest

from score import Case, score, table, wilson  # isort: skip  # of the laboratory


def case(**changes: object) -> Case:
    usual: dict[str, object] = {
        "fault": "stop",
        "e2e_ns": 1000,
        "done_ns": 300.0,
        "said_ns": 300.0,
        "right": True,
        "named": None,
        "false_alarm": False,
        "baseline_right": False,
    }
    return Case(**{**usual, **changes})  # type: ignore[arg-type]


def test_a_request_is_affected_from_a_tenth_of_its_life_on() -> None:
    result = score([case(done_ns=99.0, right=False), case(done_ns=100.0)], ["stop"])
    assert result.rows[0].requests == 1
    assert result.rows[0].top1_ratio == 1.0
    assert result.top1_ratio == 1.0


def test_top_cause_and_culprit_count_over_the_affected() -> None:
    cases = [case(named=True), case(named=False), case(right=False, named=False), case()]
    row = score(cases, ["stop"]).rows[0]
    assert row.top1_ratio == 0.75
    assert row.culprit_ratio == pytest.approx(1 / 3)


def test_figures_that_do_not_apply_are_absent() -> None:
    result = score([case(fault="none", done_ns=0.0, right=False)], ["none", "stop"])
    assert [row.name for row in result.rows] == ["none"]
    row = result.rows[0]
    assert (row.size_ratio, row.top1_ratio, row.culprit_ratio, row.size_error_p50) == (None,) * 4
    assert row.false_alarm_ratio == 0.0
    assert result.culprit_ratio is None
    assert result.to_json({"x": "why"})["not_run"] == [{"name": "x", "reason": "why"}]


def test_sizes_are_scored_only_where_the_truth_itself_is_sharp_enough() -> None:
    cases = [
        case(said_ns=270.0, spread_ns=100.0),
        case(said_ns=0.0, spread_ns=101.0),
        case(said_ns=0.0, sized=False),
    ]
    result = score(cases, ["stop"])
    assert result.rows[0].size_error_p50 == pytest.approx(0.1)
    assert result.counts["stop"].sized == 1


def test_false_alarms_count_over_those_to_whom_nothing_was_done() -> None:
    cases = [case(done_ns=0.0, false_alarm=True), case(done_ns=0.0), case()]
    assert score(cases, ["stop"]).false_alarm_ratio == 0.5


def test_the_table_tells_the_requests_behind_each_figure() -> None:
    text = table(score([case(), case(right=False)], ["stop"]), {"irq": "no probe"})
    assert "| stop | 0.30 | 2 | 1 of 2 |  | 0.0% (2) |  | 0 of 2 |" in text
    assert "| irq | no probe |" in text


def test_wilson_bounds() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(95, 100)
    assert (low, high) == (pytest.approx(0.888, abs=1e-3), pytest.approx(0.978, abs=1e-3))
    assert wilson(10, 10)[1] == 1.0
