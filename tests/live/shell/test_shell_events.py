"""Rare events of a real session: stalls with the stack that py-spy reads, and a cost too high."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from shell_lab import Engine

from dsagent.agent import overhead
from dsagent.agent.facts import Event
from dsagent.agent.session import Session
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sources import stall
from dsagent.agent.target import resolve


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


class Listener:
    name = "listener"

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.changed = threading.Condition()

    def start(self) -> None:
        pass

    def take(self, batch: Explained) -> None:
        with self.changed:
            self.events.extend(batch.events)
            self.changed.notify_all()

    def wait(self, name: str) -> Event:
        with self.changed:
            assert self.changed.wait_for(
                lambda: any(event.name == name for event in self.events), 60
            ), self.events
        return next(event for event in self.events if event.name == name)

    def status(self) -> SinkStatus:
        return SinkStatus(self.name)

    def stop(self, deadline_s: float) -> None:
        pass


@contextmanager
def attached(engine: Engine, **options: Any) -> Iterator[tuple[Listener, list[dict[str, Any]]]]:
    """A session in a thread, attached; its summary is in the list afterwards."""
    listener, summaries, begun = Listener(), [], threading.Event()
    session = Session(resolve(engine.pid), [listener], on_attached=begun.set, **options)
    thread = threading.Thread(target=lambda: summaries.append(session.run()))
    thread.start()
    try:
        assert begun.wait(60)
        yield listener, summaries
    finally:
        session.stop()
        thread.join()


def test_a_step_that_does_not_end(engine: Engine) -> None:
    with attached(engine) as (listener, _):
        engine.do("request r1")
        engine.do("step 4000")
        began = listener.wait("engine.stalled")
        assert "step 7 has run for 2." in began.message
        if stall._find_py_spy() is not None:
            assert "shell_engine.py" in listener.wait("engine.stalled.stack").message
        over = listener.wait("engine.resumed")
        assert int(over.attributes["stalled_ns"]) > 3_900_000_000
    assert [event.name for event in listener.events].count("engine.stalled") == 1


def test_requests_and_no_step(engine: Engine) -> None:
    with attached(engine) as (listener, _):
        engine.do("open r1")
        message = listener.wait("engine.stalled").message
        assert "requests are open and no step has run" in message


def test_it_steps_down_and_says_so_where_watching_is_too_dear(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "WINDOW_NS", 1)
    with attached(engine, max_overhead_ratio=1e-9) as (listener, summaries):
        engine.do("request r1")
        message = listener.wait("agent.over_budget").message
        assert "--max-overhead 0.00%" in message
        engine.do("request r2")  # it goes on without
    kernel = next(source for source in summaries[0]["sources"] if source["name"] == "kernel")
    assert kernel["state"] == "unavailable"
    if "is off" in message:
        assert kernel["reason"].startswith("stepped down: overhead is ")
    assert summaries[0]["requests"] == 2
