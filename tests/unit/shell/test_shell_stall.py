"""When the loop stands still, and what is said of it."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from dsagent.agent.facts import Event, Target
from dsagent.agent.sources import stall
from dsagent.agent.sources.stall import Progress, Stall, StallSource, find_stall

S = 1_000_000_000


def progress(
    *,
    running: tuple[tuple[int, int, int, int], ...] = (),
    p99_ns: int | None = 50_000_000,
    last_end_ns: int | None = None,
    oldest_open_ns: int | None = None,
) -> Progress:
    return Progress(running, p99_ns, last_end_ns, oldest_open_ns)


def running_since(start_ns: int) -> tuple[tuple[int, int, int, int], ...]:
    return ((7, 41, start_ns, start_ns),)


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        (progress(running=running_since(8 * S + 1)), None),
        (progress(running=running_since(8 * S - 1)), Stall(8 * S - 1, 41, 7)),
        # Slow steps are usual here: ten times their p99 is longer than 2 s.
        (progress(running=running_since(8 * S - 1), p99_ns=S), None),
        (progress(running=running_since(8 * S - 1), p99_ns=None), Stall(8 * S - 1, 41, 7)),
        (progress(), None),  # idle
        (progress(oldest_open_ns=7 * S), Stall(7 * S, None, 5)),
        (progress(oldest_open_ns=9 * S), None),  # idle for long, but owed a step only now
        (progress(oldest_open_ns=3 * S, last_end_ns=9 * S), None),
        (progress(oldest_open_ns=3 * S, last_end_ns=7 * S), Stall(7 * S, None, 5)),
    ],
)
def test_find_stall(seen: Progress, found: Stall | None) -> None:
    assert find_stall(seen, 10 * S, 5) == found


def poll_all(source: StallSource, *nows_s: float) -> list[Event]:
    return [event for now_s in nows_s for event in source.poll(round(now_s * S)).events]


def source(
    monkeypatch: pytest.MonkeyPatch, py_spy: str | None, seen: list[Progress]
) -> StallSource:
    monkeypatch.setattr(stall, "_find_py_spy", lambda: py_spy)
    target = Target(os.getpid(), 1, 1, "engine", (), "reference")
    return StallSource(target, lambda: seen[0])


def test_one_event_when_it_begins_and_one_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [progress(running=((os.getpid(), 41, 5 * S, 5 * S),))]
    watched = source(monkeypatch, None, seen)
    events = poll_all(watched, 6.0, 7.5, 7.6, 7.7)
    assert [event.name for event in events] == ["engine.stalled"]
    assert events[0].message == "the engine's loop stands still: step 41 has run for 2.5 s"
    seen[0] = progress()
    events = poll_all(watched, 8.0, 8.1)
    assert [event.name for event in events] == ["engine.resumed"]
    assert events[0].attributes["stalled_ns"] == 3 * S
    assert "no py-spy" in watched.status().reason
    watched.stop()
    watched.stop()


def test_a_py_spy_that_cannot_run_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [progress(running=((os.getpid(), 41, 0, 0),))]
    watched = source(monkeypatch, "/nonexistent/py-spy", seen)
    assert [event.name for event in poll_all(watched, 3.0, 3.1)] == ["engine.stalled"]
    assert "no py-spy" in watched.status().reason


def test_stacks_are_bounded_and_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [progress(running=((os.getpid(), 41, 0, 0),))]
    watched = source(monkeypatch, "/bin/echo", seen)  # says what it is asked
    events = poll_all(watched, 3.0)
    while len(events) < 2:
        os.sched_yield()
        events += poll_all(watched, 3.1)
    assert events[1].name == "engine.stalled.stack"
    assert events[1].message == f"dump --nonblocking --pid {os.getpid()}"


def test_a_py_spy_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [progress(running=((os.getpid(), 41, 0, 0),))]
    watched = source(monkeypatch, "/usr/bin/yes", seen)
    poll_all(watched, 3.0, 5.0)
    dump = watched._dump
    assert dump is not None
    assert poll_all(watched, 14.0) == []
    assert dump._process.returncode is not None
    assert watched._dump is None


HANGS = """
import os, sys
from dsagent.agent.facts import Target
from dsagent.agent.sources import stall
stall._find_py_spy = lambda: "/usr/bin/yes"
running = ((os.getpid(), 41, 0, 0),)
source = stall.StallSource(Target(1, 1, 1, "x", (), "x"), lambda: stall.Progress(running, 1, 1, 1))
source.poll(5_000_000_000)
print(source._dump._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_py_spy_dies_with_the_agent() -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", HANGS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert agent.stdout is not None
    pidfd = os.pidfd_open(int(agent.stdout.readline()))
    try:
        agent.kill()
        agent.communicate(timeout=60)
        assert select.select([pidfd], [], [], 60.0)[0]
    finally:
        os.close(pidfd)
