"""What sinks have to tell is told once, to people and to the other sinks."""

from __future__ import annotations

from dsagent.agent.session.sink_news import MAX_NOTICES, SinkNews
from dsagent.agent.sinks.base import SinkStatus


def test_an_end_is_told_once() -> None:
    lines: list[str] = []
    news = SinkNews(lines.append)
    ended = SinkStatus("recording", ended=True, reason="the disk is full")
    going_on = SinkStatus("otlp", reason="refused")
    (event,) = news.of([going_on, ended], 5)
    assert (event.name, event.message) == (
        "sink.ended",
        "sink recording takes no more: the disk is full",
    )
    assert news.of([going_on, ended], 6) == []
    assert lines == [event.message]


def test_each_notice_is_told_once_and_not_for_ever() -> None:
    lines: list[str] = []
    news = SinkNews(lines.append)
    for number in range(3 * MAX_NOTICES):
        status = SinkStatus("otlp", notice=f"number {number}")
        events = news.of([status], number) + news.of([status], number)
        assert [event.name for event in events] == ["sink.notice"] * (number < MAX_NOTICES)
    assert len(lines) == MAX_NOTICES
