"""A real stall, seen while it lasts, with the stack that py-spy reads."""

from __future__ import annotations

import threading

from shell_lab import Engine

from dsagent.agent.facts import Event
from dsagent.agent.session import Session
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sources import stall
from dsagent.agent.target import resolve


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


def test_a_step_that_does_not_end(engine: Engine) -> None:
    listener = Listener()
    session = Session(resolve(engine.pid), [listener])
    thread = threading.Thread(target=session.run)
    thread.start()
    try:
        engine.do("request r1")
        engine.do("step 4000")
        began = listener.wait("engine.stalled")
        assert "step 7 has run for 2." in began.message
        if stall._find_py_spy() is not None:
            assert "shell_engine.py" in listener.wait("engine.stalled.stack").message
        over = listener.wait("engine.resumed")
        assert int(over.attributes["stalled_ns"]) > 3_900_000_000
    finally:
        session.stop()
        thread.join()
    assert [event.name for event in listener.events].count("engine.stalled") == 1


def test_requests_and_no_step(engine: Engine) -> None:
    listener = Listener()
    session = Session(resolve(engine.pid), [listener])
    thread = threading.Thread(target=session.run)
    thread.start()
    try:
        engine.do("open r1")
        message = listener.wait("engine.stalled").message
        assert "requests are open and no step has run" in message
    finally:
        session.stop()
        thread.join()
