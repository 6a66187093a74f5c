"""The small parts: back-off, log, sinks that are tried again, one page for all engines."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from dsagent.agent.facts import ClockAnchor, Target
from dsagent.agent.listening.admission import ListenOptions
from dsagent.agent.metrics import catalog, sidecar_metrics
from dsagent.agent.metrics.series import Family, NumberPoint
from dsagent.agent.sidecar.backoff import SECOND_NS, Backoff
from dsagent.agent.sidecar.kept import Kept, Retried
from dsagent.agent.sidecar.listener import Health, Listener, merged
from dsagent.agent.sidecar.log import Log
from dsagent.agent.sidecar.own_metrics import Figures, families
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.recording import RecordingSink

S = SECOND_NS
BATCH = Explained(
    Target(1, 1, 0, "engine", (), "reference"), ClockAnchor(0, 1_700_000_000 * S, 0), 0
)


def test_back_off_doubles_up_to_its_bound_and_begins_anew() -> None:
    backoff = Backoff(S, 10 * S)
    assert backoff.due(0)
    assert [backoff.failed(0) // S for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert not backoff.due(10 * S - 1)
    assert backoff.due(10 * S)
    backoff.succeeded()
    assert backoff.due(0)
    assert backoff.failed(0) == S
    for _ in range(1000):
        backoff.failed(0)
    assert backoff.due_ns == 10 * S


def lines_of(*, as_json: bool) -> tuple[Log, list[str]]:
    lines: list[str] = []
    return Log(as_json=as_json, put=lines.append, unix_s=lambda: 1.5), lines


def test_a_log_line_says_what_happened_once() -> None:
    log, lines = lines_of(as_json=False)
    for _ in range(3):
        log.say("engine.waiting", "no\nright \x1b[31m", about="1")
    log.say("engine.waiting", "no\nright \x1b[31m", about="2")
    assert lines == ["1970-01-01T00:00:01.500Z engine.waiting no\\nright \\x1b[31m\n"] * 2
    assert log.repeated == 2
    log.say("engine.waiting", "another reason", about="1")
    log.over("engine.waiting", "1")
    log.say("engine.waiting", "another reason", about="1")
    assert len(lines) == 4


def test_a_log_line_as_json() -> None:
    log, lines = lines_of(as_json=True)
    log.say("engine.attached", "watching", pid=7, engine="0")
    assert json.loads(lines[0]) == {
        "time": "1970-01-01T00:00:01.500Z",
        "event": "engine.attached",
        "message": "watching",
        "pid": 7,
        "engine": "0",
    }


class Counting:
    name = "counting"

    def __init__(self) -> None:
        self.started = self.taken = self.stopped = 0

    def start(self) -> None:
        self.started += 1

    def take(self, batch: Explained) -> None:
        self.taken += 1

    def status(self) -> SinkStatus:
        return SinkStatus(self.name, self.taken)

    def stop(self, deadline_s: float) -> None:
        self.stopped += 1


def test_a_kept_sink_goes_on_through_attachments() -> None:
    sink = Counting()
    kept = Kept(sink)
    for _ in range(3):
        kept.start()
        kept.take(BATCH)
        kept.stop(1.0)
    assert (sink.started, sink.taken, sink.stopped) == (1, 3, 0)
    kept.end(0.0)
    kept.end(0.0)
    assert sink.stopped == 1


def test_a_recording_that_cannot_begin_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "rec"
    folder.write_text("a file is in the way")
    now_ns = 0
    sink = Retried("recording", lambda: RecordingSink(folder), now_ns=lambda: now_ns)
    sink.start()
    sink.take(BATCH)
    status = sink.status()
    assert "it is not a folder" in status.reason
    assert "tried again in 60 s" in status.notice
    assert not status.ended
    folder.unlink()
    now_ns = 59 * S
    sink.take(BATCH)
    assert not folder.exists()
    now_ns = 60 * S
    sink.take(BATCH)
    assert (folder / "meta.json").exists()
    sink.stop(5.0)
    sink.take(BATCH)  # and is not made anew after that
    assert sink.status().acknowledged > 0


class Ending(Counting):
    """Takes one batch, then its disk is full."""

    def status(self) -> SinkStatus:
        return SinkStatus(self.name, self.taken, ended=self.taken > 0, reason="disk full")


def test_a_sink_that_has_ended_is_made_anew_and_its_counts_go_on() -> None:
    now_ns = 0
    made: list[Ending] = []

    def make() -> Ending:
        made.append(Ending())
        return made[-1]

    sink = Retried("counting", make, now_ns=lambda: now_ns)
    sink.start()
    sink.take(BATCH)
    sink.take(BATCH)  # the one that finds it ended
    now_ns = 59 * S
    sink.take(BATCH)
    assert [each.taken for each in made] == [1]
    assert made[0].stopped == 1
    assert "disk full; tried again in 60 s" in sink.status().notice
    now_ns = 61 * S
    sink.take(BATCH)
    assert [each.taken for each in made] == [1, 1]
    assert (sink.status().sent, sink.status().ended) == (2, False)


def test_one_page_of_all_engines() -> None:
    def of(value: float) -> list[Family]:
        return [
            Family(catalog.CLOCK_ERROR, (NumberPoint((), value),)),
            Family(catalog.SINK_SENT, (NumberPoint((("sink", "otlp"),), value),)),
        ]

    own = [Family(sidecar_metrics.SIDECAR_RESTARTS, (NumberPoint((), 1.0),))]
    page = merged(own, [("0", True, of(1.0)), ("1", False, of(2.0))])
    by_name = {family.metric.name: family.numbers for family in page}
    assert len(page) == len(by_name) == 3
    label0, label1 = ("engine", "0"), ("engine", "1")
    # Of an engine that has gone, only what adds up.
    assert by_name[catalog.CLOCK_ERROR.name] == (NumberPoint((label0,), 1.0),)
    assert by_name[catalog.SINK_SENT.name] == (
        NumberPoint((label0, ("sink", "otlp")), 1.0),
        NumberPoint((label1, ("sink", "otlp")), 2.0),
    )


def test_no_metric_has_an_engine_label_of_its_own() -> None:
    assert not [metric.name for metric in catalog.CATALOGUE if "engine" in metric.attributes]


def test_the_sidecars_own_metrics_are_all_shown_and_absent_is_absent() -> None:
    figures = Figures(("watching", "waiting", "watching"), 2, 3, 1, True, 50, 100, 1)
    shown = families(figures)
    assert {family.metric for family in shown} == set(sidecar_metrics.SIDECAR_METRICS)
    states = next(f for f in shown if f.metric is sidecar_metrics.SIDECAR_ENGINES)
    assert {point.labels[0][1]: point.value for point in states.numbers} == {
        "watching": 2.0,
        "waiting": 1.0,
    }
    without = families(Figures((), 0, 0, 0, False, None, None, 0))
    assert len(without) == len(shown) - 2


def test_a_port_that_is_taken_and_a_token_that_is_not_there_are_tried_again(
    tmp_path: Path,
) -> None:
    listener = Listener(list, lambda: Health(False, ("why",), 0))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listener.set(address, ListenOptions())
        listener.attend(0)
        assert "Address already in use; choose another" in listener.reason
        assert listener.describe()["state"] == "waiting"
    listener.attend(S - 1)
    assert listener.port is None
    listener.attend(S)
    assert (listener.reason, listener.describe()["state"]) == ("", "ok")
    listener.set("127.0.0.1:0", ListenOptions(token_file=tmp_path / "token"))
    listener.attend(S)
    assert "cannot read" in listener.reason
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123\n")
    token.chmod(0o600)
    listener.attend(3 * S)
    assert listener.port
    listener.set("0.0.0.0:0", ListenOptions())
    listener.attend(3 * S)
    assert "give --listen-token-file" in listener.reason
    listener.set(None, ListenOptions())
    listener.attend(60 * S)
    assert listener.describe()["state"] == "off"
    listener.stop()
