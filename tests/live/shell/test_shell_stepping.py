"""Looking at less where it costs too much, and at more again, for real: the load that makes it dear
comes and goes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from shell_lab import Engine

from dsagent.agent.again import attribute_again
from dsagent.agent.attribution.account import Account
from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Event, SourceStatus
from dsagent.agent.host.target import resolve
from dsagent.agent.session import budget, overhead
from dsagent.agent.session import loop as session_module
from dsagent.agent.session.feeds import Feeds
from dsagent.agent.session.loop import Session
from dsagent.agent.sinks.base import Explained, Sink, SinkStatus
from dsagent.agent.sinks.recording import RecordingSink
from dsagent.agent.sources.kernel import check

pytestmark = pytest.mark.ebpf

# Two processes on one CPU that do nothing but wake each other.
PING_PONG = """
import os
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
there, back = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(there[1])  # so that it reads the end once the other is killed
    while os.read(there[0], 1):
        os.write(back[1], b"x")
print("ready", flush=True)
while True:
    os.write(there[1], b"x")
    os.read(back[0], 1)
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    try:
        check()
    except SourceUnavailable as reason:
        pytest.skip(str(reason))


class Listener:
    name = "listener"

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.kernel: list[SourceStatus] = []
        self.accounts: list[Account] = []
        self.changed = threading.Condition()

    def start(self) -> None:
        pass

    def take(self, batch: Explained) -> None:
        with self.changed:
            self.events += [e for e in batch.events if e.name.endswith("_budget")]
            self.kernel += [status for status in batch.sources if status.name == "kernel"]
            self.accounts += batch.accounts
            self.changed.notify_all()

    def wait(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.kernel) and what(), 90), (
                self.events,
                self.kernel[-1],
            )

    def status(self) -> SinkStatus:
        return SinkStatus(self.name)

    def stop(self, deadline_s: float) -> None:
        pass


@contextmanager
def attached(engine: Engine, *sinks: Sink, **options: Any) -> Iterator[Listener]:
    listener, begun = Listener(), threading.Event()
    session = Session(resolve(engine.pid), [listener, *sinks], on_attached=begun.set, **options)
    thread = threading.Thread(target=session.run)
    thread.start()
    try:
        assert begun.wait(60)
        yield listener
    finally:
        session.stop()
        thread.join()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "WINDOW_NS", 400_000_000)
    monkeypatch.setattr(session_module, "STATUS_NS", 200_000_000)
    monkeypatch.setattr(budget, "CALM_WINDOWS", 3)


@pytest.mark.usefixtures("short_windows")
def test_it_steps_down_while_looking_is_too_dear_and_up_again(engine: Engine) -> None:
    with attached(engine, max_overhead_ratio=0.004) as listener:
        engine.do("request r1")
        command = [sys.executable, "-S", "-c", PING_PONG]
        with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as load:
            try:
                assert load.stdout is not None
                load.stdout.readline()
                listener.wait(lambda: bool(listener.events))
                listener.wait(lambda: "stepped down from default" in listener.kernel[-1].reason)
            finally:
                load.kill()
        down = listener.events[0]
        assert down.name == "agent.over_budget"
        assert down.message.startswith("the kernel source looks at tier core: overhead is ")
        assert down.message.endswith("--max-overhead 0.40%")
        # However far down it went, it comes back to what was asked for, and says so.
        listener.wait(lambda: (listener.kernel[-1].state, listener.kernel[-1].reason) == ("ok", ""))
        up = listener.events[-1]
        assert up.name == "agent.within_budget"
        assert up.message.startswith("the kernel source looks at tier default again: expected to ")
        engine.do("request r2")
        listener.wait(lambda: len(listener.accounts) == 2)
        costs = [status.cost_ns for status in listener.kernel]
        assert costs == sorted(costs)


@pytest.mark.usefixtures("short_windows")
def test_off_is_said_and_it_goes_on_without(engine: Engine, tmp_path: Path) -> None:
    recording = RecordingSink(tmp_path / "rec")
    with attached(engine, recording, max_overhead_ratio=1e-9) as listener:
        engine.do("request r1")
        listener.wait(lambda: listener.kernel[-1].state == "unavailable")
        assert listener.kernel[-1].reason.startswith("stepped down from core: overhead is ")
        messages = [event.message.partition(":")[0] for event in listener.events]
        assert messages[:2] == ["the kernel source looks at tier core", "source kernel is off"]
        engine.do("request r2")
        listener.wait(lambda: len(listener.accounts) == 2)
        assert listener.accounts[1].not_looked_at == ("kernel",)
    assert list(attribute_again(tmp_path / "rec")) == listener.accounts


def test_from_off_it_is_loaded_anew_and_tags_by_step_again(engine: Engine) -> None:
    feeds = Feeds(resolve(engine.pid))
    feeds.start()
    kernel = feeds.feed("kernel")
    try:
        engine.do("request r1")
        feeds.poll(time.monotonic_ns())
        before = kernel.status()
        feeds.kernel_off("for a test")
        assert (kernel.status().state, kernel.status().reason) == ("unavailable", "for a test")
        feeds.kernel_look_at("core", "tier core, for a test")
        status = kernel.status()
        assert (status.state, status.reason) == ("ok", "tier core, for a test")
        assert status.cost_ns >= before.cost_ns > 0
        engine.do("request r2")
        tagged = 0
        deadline = time.monotonic() + 30
        while not tagged and time.monotonic() < deadline:
            for readings in feeds.poll(time.monotonic_ns()):
                tagged += int((readings.facts["step_id"] > 0).sum())
            time.sleep(0.01)
        assert tagged
    finally:
        feeds.stop()


def test_asked_for_less_it_never_looks_at_more(engine: Engine) -> None:
    feeds = Feeds(resolve(engine.pid), tier="core")
    feeds.start()
    try:
        kernel = feeds._kernel
        assert kernel is not None and kernel.loaded is not None
        assert kernel.tier == "core"
        assert not kernel.loaded._attached  # but what is never detached
    finally:
        feeds.stop()
