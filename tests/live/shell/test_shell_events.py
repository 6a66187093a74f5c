"""Rare events of a real session: stalls with the stack that py-spy reads, and faults of our own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from shell_lab import Engine

from dsagent.agent.attribution.account import Account
from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.facts import Event
from dsagent.agent.host.target import resolve
from dsagent.agent.session.loop import Session
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sources import stall
from dsagent.agent.sources.proc import ProcSource


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


class Listener:
    name = "listener"

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.accounts = 0
        self.changed = threading.Condition()

    def start(self) -> None:
        pass

    def take(self, batch: Explained) -> None:
        with self.changed:
            self.events.extend(batch.events)
            self.accounts += len(batch.accounts)
            self.changed.notify_all()

    def wait(self, name: str) -> Event:
        with self.changed:
            assert self.changed.wait_for(
                lambda: any(event.name == name for event in self.events), 60
            ), self.events
        return next(event for event in self.events if event.name == name)

    def wait_accounts(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.accounts >= count, 60)

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


@pytest.mark.parametrize("method", ["add", "due"])
def test_a_fault_in_the_accounting_is_counted_told_once_and_survived(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    proper = getattr(Accountant, method)
    faults = iter(range(3))

    def faulty(self: Accountant, argument: Any) -> Any:
        if next(faults, None) is not None:
            raise RuntimeError("cannot count")
        return proper(self, argument)

    monkeypatch.setattr(Accountant, method, faulty)
    with attached(engine) as (listener, summaries):
        message = listener.wait("agent.failed").message
        assert "RuntimeError: cannot count (test_shell_events.py:" in message
        engine.do("request r1")
        listener.wait_accounts(1)
    assert summaries[0]["accounting_failures"] == 3
    assert [event.name for event in listener.events].count("agent.failed") == 1
    assert summaries[0]["requests"] == 1


def test_at_the_end_facts_still_to_come_are_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's facts come with the polls after the end; nobody pretends that time passed."""
    dues: list[int] = []
    proper = Accountant.due

    def due(self: Accountant, now_ns: int) -> list[Account]:
        dues.append(now_ns - time.monotonic_ns())
        return proper(self, now_ns)

    monkeypatch.setattr(Accountant, "due", due)
    with attached(engine) as (_, summaries):
        engine.do("request r1")
    assert summaries[0]["requests"] == 1
    assert max(dues) <= 0


def test_a_request_that_never_gets_its_facts_is_accounted_for_after_half_a_second(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accountant, "_facts_reach", lambda _self, moment, now: now - moment > 2e9)
    with attached(engine) as (_, summaries):
        engine.do("request r1")
    assert summaries[0]["requests"] == 1


def test_a_source_that_raises_in_its_status_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(_self: ProcSource) -> None:
        raise RuntimeError("no status")

    monkeypatch.setattr(ProcSource, "status", status)
    with attached(engine) as (listener, summaries):
        assert "source proc failed" in listener.wait("source.failed").message
        engine.do("request r1")
        listener.wait_accounts(1)
    states = {source["name"]: source["state"] for source in summaries[0]["sources"]}
    assert (states["proc"], states["steps"]) == ("failed", "ok")
    assert summaries[0]["requests"] == 1
