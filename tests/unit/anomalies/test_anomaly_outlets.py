"""What becomes of a finding: a log of its trace, a row of a recording, lines for people; and the
error where the library is missing."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
from made import ANCHOR, MS, S
from rich.console import Console

from dsagent.agent.anomalies.finding import Finding
from dsagent.agent.anomalies.make import make_watch
from dsagent.agent.errors import DsagentError
from dsagent.agent.screens import render
from dsagent.agent.session.log_lines import INFO, TRACE_IDS, WARN, LogLines
from dsagent.agent.sinks.rows import event_row
from dsagent.instrumentation import names

FOUND = Finding(
    kind="step",
    state="begun",
    feature=names.STEP_SAMPLE_NS,
    value=30.4 * MS,
    usual=0.41 * MS,
    unit="ns",
    score=60.0,
    seen=24,
    begun_ns=2100 * S,
    now_ns=2101 * S,
    also=("dsagent.step.duration_ns",),
    trace_ids=(f"{7:032x}", f"{8:032x}"),
)


def test_its_log_is_of_the_trace_that_moved_most_and_names_all() -> None:
    line = LogLines().of_event(FOUND.event())
    assert (line.severity, line.event_name) == (WARN, "dsagent.anomaly.begun")
    assert line.trace_id == 7
    assert line.attributes[TRACE_IDS] == FOUND.trace_ids
    assert line.attributes["dsagent.anomaly.feature"] == names.STEP_SAMPLE_NS
    assert (line.attributes["dsagent.anomaly.value"], line.attributes["dsagent.anomaly.usual"]) == (
        30_400_000,
        410_000,
    )
    assert "30.4 ms, usually 0.41 ms (24 steps" in line.text


def test_its_end_is_no_warning() -> None:
    ended = Finding(**{**_fields(FOUND), "state": "ended", "now_ns": 2106 * S})
    line = LogLines().of_event(ended.event())
    assert (line.severity, line.event_name) == (INFO, "dsagent.anomaly.ended")
    assert "over after 6.00 s" in line.text


def _fields(finding: Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in Finding.__slots__}


def test_a_recording_keeps_its_traces() -> None:
    row = event_row(FOUND.event(), ANCHOR)
    assert ("trace_ids", " ".join(FOUND.trace_ids)) in row[-1]
    assert row[3] == "anomaly.begun"


def test_people_see_it_in_why_and_in_the_summary() -> None:
    document = {"requests": 1, "causes": [], "culprits": [], "worst": []}

    def shown(anomalies: list[Any]) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(render.why({**document, "anomalies": anomalies}, "10m"))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    text = shown([FOUND.to_json()])
    assert "dsagent.step.sample_ns of steps" in text
    assert "30.4 ms, usually 0.41 ms" in text
    assert f"most in trace {7:032x}" in text
    assert "No anomaly was found." in shown([])


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("watch", "episodes", "detector", "reference"):
        monkeypatch.delitem(sys.modules, f"dsagent.agent.anomalies.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "river.stats", None)
    monkeypatch.setitem(sys.modules, "river", None)
    with pytest.raises(DsagentError, match=r"river: pip install 'dsagent\[anomalies\]'"):
        make_watch()


def test_an_agent_that_does_not_watch_does_not_load_the_library() -> None:
    looks = (
        "import sys, dsagent.agent.commands.attach; "
        "import dsagent.agent.session.loop, dsagent.agent.session.outlets; "
        "sys.exit('river' in sys.modules or 'scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", looks], check=False).returncode == 0
