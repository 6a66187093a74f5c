"""Which events and requests become lines of a log, and what they say."""

from __future__ import annotations

from dataclasses import replace

from made import S, account

from dsagent.agent.facts import Event
from dsagent.agent.session.log_lines import (
    ERROR,
    FAILED_REQUEST,
    INFO,
    MAX_OPEN,
    MAX_TRACE_IDS,
    SLOW_REQUEST,
    TRACE_IDS,
    WARN,
    LogLines,
)
from dsagent.agent.session.sampling import Decision
from dsagent.agent.slo.alert import Alert
from dsagent.agent.slo.causes import Explanation
from dsagent.instrumentation.records import RequestOpen

SLOW = Decision(True, "slo:ttft", slow=True)


def request(number: int) -> RequestOpen:
    return RequestOpen(number, f"r{number}", number, number, None, None, 2000 * S, 1, 1)


def test_a_stall_names_the_requests_open_then() -> None:
    lines = LogLines()
    lines.opened(request(number) for number in range(1, 101))
    line = lines.of_event(Event("engine.stalled", 7, "it stands still", {"pid": 3}))
    assert (line.severity, line.event_name, line.mono_ns) == (ERROR, "dsagent.engine.stalled", 7)
    ids = line.attributes[TRACE_IDS]
    assert isinstance(ids, tuple)
    assert ids[0] == f"{1:032x}"
    assert len(ids) == MAX_TRACE_IDS
    assert line.attributes["dsagent.requests.open"] == 100
    assert line.trace_id is None


def test_a_stall_of_one_request_is_a_line_of_its_trace() -> None:
    lines = LogLines()
    only = request(5)
    ended = account("gone")
    lines.opened([only, replace(request(6), request_key=ended.record.request_key)])
    lines.ended(ended)
    line = lines.of_event(Event("engine.stalled", 7, "x"))
    assert (line.trace_id, line.span_id) == (only.trace_id, only.span_id)


def test_other_events_concern_nobody_in_particular() -> None:
    lines = LogLines()
    lines.opened([request(1)])
    for name, severity in (("child.started", INFO), ("source.failed", ERROR), ("new.kind", WARN)):
        line = lines.of_event(Event(name, 7, "x", {"who": "a@b.org", "pid": 1}))
        assert line.severity == severity
        assert line.attributes == {"who": "[email]", "pid": 1}
        assert line.trace_id is None


def test_open_requests_are_bounded() -> None:
    lines = LogLines()
    lines.opened(request(number) for number in range(1, 3 * MAX_OPEN))
    line = lines.of_event(Event("engine.stalled", 7, "x"))
    assert line.attributes["dsagent.requests.open"] == MAX_OPEN


def test_a_slow_request_is_a_line_in_the_words_of_explain() -> None:
    made = account("req-7")
    line = LogLines().of_request(made, SLOW)
    assert line is not None
    assert line.text.startswith("request req-7 took 1.00 s. Slow because: 50% waiting while other")
    assert "stress-ng" in line.text
    assert (line.event_name, line.severity) == (SLOW_REQUEST, WARN)
    assert (line.trace_id, line.span_id) == (made.record.trace_id, made.record.span_id)
    assert line.attributes["dsagent.request.top_cause"] == "cpu.runqueue"
    assert line.attributes["dsagent.sampling.reason"] == "slo:ttft"


def test_one_that_failed_says_why_without_anybodys_address() -> None:
    made = account("req-7", error="cannot reach ada@example.org")
    for masked, shown in ((True, "[email]"), (False, "ada@example.org")):
        line = LogLines(masked=masked).of_request(made, Decision(True, "error"))
        assert line is not None
        assert line.text.startswith(f"request req-7 failed after 1.00 s: cannot reach {shown}. ")
        assert (line.event_name, line.severity) == (FAILED_REQUEST, ERROR)
        assert line.attributes["error.type"] == f"cannot reach {shown}"


def test_neither_what_is_not_kept_nor_what_was_not_slow_is_a_line() -> None:
    made = account()
    assert LogLines().of_request(made, replace(SLOW, keep=False)) is None
    assert LogLines().of_request(made, Decision(True, "parent")) is None


def test_an_alert_is_a_line_with_the_traces_that_show_it() -> None:
    ids = tuple(f"{number:032x}" for number in range(1, 4))
    firing = Alert(
        "DsagentSloBurn",
        "firing",
        "burning",
        {"slo": "chat", "severity": "page", "tenant": "t1"},
        "time per output token burning 14×, most of all by ada@example.org",
        1,
        9,
        Explanation(exemplars=ids),
    )
    line = LogLines().of_alert(firing)
    assert (line.event_name, line.severity, line.mono_ns) == ("dsagent.alert.firing", ERROR, 9)
    assert "burning 14×, most of all by [email]" in line.text
    assert line.attributes[TRACE_IDS] == ids
    assert line.attributes["dsagent.alert.tenant"] == "t1"
    over = LogLines().of_alert(replace(firing, status="resolved", state="recovered"))
    assert (over.event_name, over.severity) == ("dsagent.alert.resolved", INFO)
    ticket = LogLines().of_alert(replace(firing, labels={"severity": "ticket"}))
    assert ticket.severity == WARN
