"""A source or a sink that fails takes nobody with it."""

from __future__ import annotations

import pytest

from dsagent.agent.errors import DsagentError, SourceUnavailable
from dsagent.agent.facts import ClockAnchor, Readings, SourceStatus, Target
from dsagent.agent.session.feeds import Feed
from dsagent.agent.session.outlets import Outlets
from dsagent.agent.sinks.base import Explained, SinkStatus

BATCH = Explained(Target(1, 1, 1, "x", (), "reference"), ClockAnchor(0, 0, 1), 0)


class Source:
    name = "odd"

    def __init__(self, fails_at: str = "", with_: Exception | None = None) -> None:
        self._fails_at, self._error = fails_at, with_ or RuntimeError("bad\x1b[0m luck")
        self.stops = 0

    def _maybe_fail(self, at: str) -> None:
        if self._fails_at == at:
            raise self._error

    def start(self) -> None:
        self._maybe_fail("start")

    def poll(self, now_ns: int) -> Readings:
        self._maybe_fail("poll")
        return Readings()

    def status(self) -> SourceStatus:
        self._maybe_fail("status")
        return SourceStatus(self.name, "ok", dropped=3, cost_ns=5)

    def stop(self) -> None:
        self.stops += 1
        self._maybe_fail("stop")


def test_unavailable_with_its_reason() -> None:
    feed = Feed("odd", lambda: Source("start", SourceUnavailable("no BTF here")))
    feed.start()
    assert not feed.runs
    assert feed.status() == SourceStatus("odd", "unavailable", "no BTF here")
    assert feed.poll(1) is None
    feed.stop()


def test_a_start_or_an_import_that_breaks_is_failed() -> None:
    def make() -> Source:
        raise ImportError("no module named kernel")

    for feed in (Feed("odd", make), Feed("odd", lambda: Source("start"))):
        feed.start()
        assert feed.status().state == "failed"
    assert feed.status().reason.startswith("RuntimeError: bad\\x1b[0m luck (test_shell_feeds.py:")


def test_a_poll_that_breaks_ends_that_source_and_tells() -> None:
    source = Source("poll")
    feed = Feed("odd", lambda: source)
    feed.start()
    readings = feed.poll(7)
    assert readings is not None
    assert [event.name for event in readings.events] == ["source.failed"]
    assert (feed.status().state, feed.status().dropped, source.stops) == ("failed", 3, 1)
    assert feed.poll(8) is None
    feed.stop()
    assert source.stops == 1


def test_switched_off() -> None:
    source = Source()
    feed = Feed("odd", lambda: source)
    feed.start()
    feed.switch_off("too dear")
    assert feed.status() == SourceStatus("odd", "unavailable", "too dear", 3, cost_ns=5)
    assert source.stops == 1


def test_a_status_that_breaks_ends_that_source_and_tells() -> None:
    source = Source("status")
    feed = Feed("odd", lambda: source)
    feed.start()
    assert feed.status().state == "failed"
    assert source.stops == 1
    readings = feed.poll(8)
    assert readings is not None
    assert [event.name for event in readings.events] == ["source.failed"]
    assert feed.poll(9) is None


@pytest.mark.parametrize("how", ["stop", "switch_off", "poll"])
def test_a_stop_that_breaks_is_told_with_the_status(how: str) -> None:
    source = Source("stop")
    feed = Feed("odd", lambda: source)
    feed.start()
    if how == "switch_off":
        feed.switch_off("too dear")
    elif how == "poll":
        feed.fail("bad poll")
    feed.stop()
    feed.stop()
    assert source.stops == 1
    assert "RuntimeError: bad" in feed.status().reason
    assert feed.status().dropped == 3  # what was known of it stays


def test_a_failing_status_at_the_end_still_stops_the_source() -> None:
    source = Source("status")
    feed = Feed("odd", lambda: source)
    feed.start()
    feed.stop()
    assert source.stops == 1
    assert feed.status().state == "failed"


class Sink:
    def __init__(self, name: str, fails_at: str = "") -> None:
        self.name, self._fails_at = name, fails_at
        self.taken: list[Explained] = []
        self.stopped_s: list[float] = []

    def start(self) -> None:
        if self._fails_at == "start":
            raise DsagentError("port in use")

    def _maybe_fail(self, at: str) -> None:
        if self._fails_at == at:
            raise ValueError("bug")

    def take(self, batch: Explained) -> None:
        self._maybe_fail("take")
        self.taken.append(batch)

    def status(self) -> SinkStatus:
        self._maybe_fail("status")
        return SinkStatus(self.name, sent=len(self.taken))

    def stop(self, deadline_s: float) -> None:
        self.stopped_s.append(deadline_s)
        self._maybe_fail("stop")


def test_a_sink_that_raises_gets_no_more_and_is_counted() -> None:
    good, bad = Sink("good"), Sink("bad", "take")
    outlets = Outlets([bad, good])
    outlets.start()
    outlets.take(BATCH)
    outlets.take(BATCH)
    outlets.stop(4.0)
    outlets.stop(0.0)
    assert len(good.taken) == 2
    assert good.stopped_s == [4.0]
    by_name = {status.name: status for status in outlets.statuses()}
    assert by_name["bad"].failed == 1
    assert by_name["bad"].reason.startswith("ValueError: bug (test_shell_feeds.py:")
    assert by_name["good"] == SinkStatus("good", sent=2)


def test_a_sink_that_cannot_start_ends_the_attempt_and_the_others_are_stopped() -> None:
    good = Sink("good")
    outlets = Outlets([good, Sink("bad", "start")])
    with pytest.raises(DsagentError, match="port in use"):
        outlets.start()
    outlets.stop(0.0)
    assert good.stopped_s == [0.0]


@pytest.mark.parametrize("at", ["status", "stop"])
def test_a_sink_that_raises_elsewhere_is_counted_too(at: str) -> None:
    good, bad = Sink("good"), Sink("bad", at)
    outlets = Outlets([bad, good])
    outlets.start()
    outlets.take(BATCH)
    assert {status.name for status in outlets.statuses()} == {"good", "bad"}
    outlets.take(BATCH)
    outlets.stop(1.0)
    by_name = {status.name: status for status in outlets.statuses()}
    assert by_name["good"] == SinkStatus("good", sent=2)
    assert by_name["bad"].failed > 0
    assert "ValueError: bug" in by_name["bad"].reason
    assert len(bad.stopped_s) == 1
