"""Engines beyond the limit, engines that refuse, and injecting only where the file allows it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from dsagent.agent.errors import DsagentError
from dsagent.agent.facts import Target
from dsagent.agent.host.procfs import ProcessGone
from dsagent.agent.sidecar import engines as module
from dsagent.agent.sidecar.backoff import SECOND_NS
from dsagent.agent.sidecar.books import Books
from dsagent.agent.sidecar.engines import Engines
from dsagent.agent.sidecar.log import Log
from dsagent.agent.sidecar.options import SidecarOptions
from dsagent.agent.sidecar.processes import Key
from dsagent.agent.sidecar.scanner import Found

PID = os.getpid()  # a process that lives, and is never attached to here
S = SECOND_NS


class Lab:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.engines = Engines(Books(), Log(put=self.lines.append), lambda: None)
        self.found: list[Found] = []
        self.asked: list[str] = []
        self._patch = monkeypatch
        scanner = self.engines._scanner
        monkeypatch.setattr(scanner, "look", lambda _now_ns, _roots: self.found)

    def way_in(self, name: str, does: Callable[[int], Target]) -> None:
        def way(pid: int, *_: object) -> Target:
            self.asked.append(name)
            return does(pid)

        self._patch.setattr(module, name, way)

    def look_until_asked(self, name: str) -> None:
        deadline_s = time.monotonic() + 30
        while name not in self.asked:
            assert time.monotonic() < deadline_s, f"waited in vain for {name}: {self.lines}"
            self.engines.look(0)
            time.sleep(0.001)

    def times_asked(self, seconds: int) -> int:
        before = len(self.asked)
        for second in range(seconds):
            self.engines.look(second * S)
        return len(self.asked) - before


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    yield Lab(monkeypatch)


def _raise(error: Exception) -> NoReturn:
    raise error


def refuse(_pid: int) -> Target:
    raise DsagentError("cannot attach: it is not to be\nlooked at", exit_code=3)


def test_one_that_refuses_is_tried_ever_more_rarely_and_told_once(lab: Lab) -> None:
    lab.way_in("resolve", refuse)
    lab.found = [Found(PID, "rings")]
    lab.engines.set(SidecarOptions())
    assert lab.times_asked(64) == 7  # after 0, 1, 3, 7, 15, 31, 63 s
    assert len(lab.lines) == 1
    assert "cannot attach: it is not to be\\nlooked at" in lab.lines[0]
    (waiting,) = lab.engines.waiting_document()
    assert (waiting["pid"], waiting["failures"]) == (PID, 7)
    assert lab.engines.reasons() == ["cannot attach: it is not to be\\nlooked at"]
    assert lab.engines.states() == ("waiting",)
    lab.engines.set(SidecarOptions())  # other settings: at once
    assert lab.times_asked(1) == 1


def test_one_that_fails_unforeseen_keeps_no_other_from_being_found(lab: Lab) -> None:
    def odd(pid: int) -> Target:
        return refuse(pid) if pid != PID else _raise(ValueError("not an ELF file at all"))

    lab.way_in("resolve", odd)
    lab.found = [Found(PID, "rings"), Found(os.getppid(), "rings")]
    lab.engines.set(SidecarOptions())
    assert lab.times_asked(2) == 4  # both, each after 0 and 1 s
    reasons = lab.engines.reasons()
    assert "ValueError: not an ELF file at all (test_sidecar_engines.py:" in reasons[0]
    assert "it is not to be" in reasons[1]


@pytest.mark.parametrize("error", [ValueError("odd"), PermissionError("odd"), ProcessGone("odd")])
def test_one_that_cannot_be_injected_into_whatever_the_reason_is_seen_from_outside(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("dsagent.agent.inject.way_in.inject", lambda *_: _raise(error))
    monkeypatch.setattr(module, "_is_vllm", lambda _pid: True)
    lab.way_in("resolve_server", refuse)
    lab.found = [Found(PID, "outside")]
    lab.engines.set(SidecarOptions(allow_inject=True))
    lab.look_until_asked("resolve_server")
    assert lab.asked == ["resolve_server"]
    assert "engine.not_injected" in lab.lines[0]
    assert "odd" in lab.lines[0]


def test_nothing_is_touched_without_settings(lab: Lab) -> None:
    lab.way_in("resolve", refuse)
    lab.found = [Found(PID, "rings")]
    assert lab.times_asked(3) == 0


def test_one_that_has_ended_waits_no_more(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.way_in("resolve", refuse)
    lab.found = [Found(PID, "rings")]
    lab.engines.set(SidecarOptions())
    lab.times_asked(1)
    lab.found = []
    monkeypatch.setattr(module, "_start_ticks", lambda _pid: None)
    lab.engines.look(5 * S)
    assert lab.engines.waiting_document() == []


@pytest.mark.parametrize("allowed", [False, True])
def test_it_injects_only_where_the_settings_file_allows_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    injected: list[int] = []
    monkeypatch.setattr(
        "dsagent.agent.inject.way_in.inject", lambda pid, _say, _agrees: injected.append(pid)
    )
    monkeypatch.setattr(module, "_is_vllm", lambda _pid: True)
    lab.way_in("resolve", refuse)
    lab.way_in("resolve_server", refuse)
    lab.found = [Found(PID, "outside")]
    lab.engines.set(SidecarOptions(allow_inject=allowed))
    lab.look_until_asked("resolve" if allowed else "resolve_server")
    assert injected == ([PID] if allowed else [])
    assert lab.asked == ["resolve", "resolve_server"][not allowed :]


def test_once_the_file_allows_it_what_is_seen_from_outside_is_attached_to_anew(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched:
        def __init__(self, pid: int, engine: str) -> None:
            self.key = Key(pid, 1, 1)
            self.target = Target(pid, 1, 1, "vllm", (), engine=engine)
            self.stopped = False

        def stop(self) -> None:
            self.stopped = True

    monkeypatch.setattr(module, "_is_vllm", lambda pid: pid != 3)
    outside, inside, another = Watched(1, "http"), Watched(2, "vllm"), Watched(3, "http")
    lab.engines.set(SidecarOptions())
    monkeypatch.setattr(lab.engines, "_watches", {w.key: w for w in (outside, inside, another)})
    lab.engines.set(SidecarOptions())
    assert not outside.stopped
    lab.engines.set(SidecarOptions(allow_inject=True))
    assert (outside.stopped, inside.stopped, another.stopped) == (True, False, False)


def test_an_injection_that_is_refused_leaves_the_outside(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_pid: int, _say: object, _agrees: object) -> None:
        raise DsagentError("cannot inject: it is stopped", exit_code=3)

    monkeypatch.setattr("dsagent.agent.inject.way_in.inject", refused)
    monkeypatch.setattr(module, "_is_vllm", lambda _pid: True)
    lab.way_in("resolve_server", refuse)
    lab.found = [Found(PID, "outside")]
    lab.engines.set(SidecarOptions(allow_inject=True))
    lab.look_until_asked("resolve_server")
    assert lab.asked == ["resolve_server"]
    assert any("cannot inject: it is stopped" in line for line in lab.lines)


def test_an_injection_that_takes_long_keeps_nobody_waiting_and_is_begun_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target whose main thread is busy takes half a minute, which nobody was answered in."""
    goes_on = threading.Event()
    begun: list[int] = []

    def slow(pid: int, _say: object, _agrees: object) -> None:
        begun.append(pid)
        assert goes_on.wait(60)

    monkeypatch.setattr("dsagent.agent.inject.way_in.inject", slow)
    monkeypatch.setattr(module, "_is_vllm", lambda pid: pid == PID)
    lab.way_in("resolve", refuse)
    lab.way_in("resolve_server", refuse)
    other = os.getppid()
    lab.found = [Found(PID, "outside"), Found(other, "outside")]
    lab.engines.set(SidecarOptions(allow_inject=True))
    for allow_inject in (False, True, False, True):  # settings that change meanwhile
        lab.look_until_asked("resolve_server")
        lab.engines.set(SidecarOptions(allow_inject=allow_inject))
        lab.asked.clear()
    goes_on.set()
    lab.look_until_asked("resolve")
    assert begun == [PID]


def test_one_that_some_processes_of_have_hooks_is_not_watched_until_all_have(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("dsagent.agent.inject.way_in.inject", lambda *_: goes_on.wait(60) and None)
    monkeypatch.setattr(module, "_is_vllm", lambda _pid: True)
    start_ticks = module._start_ticks(PID)
    assert start_ticks is not None
    lab.way_in("resolve", lambda pid: Target(pid, start_ticks, 1, "vllm", (), engine="vllm"))
    attached: list[str] = []
    monkeypatch.setattr(lab.engines._slots, "take", lambda command, *_: attached.append(command))
    lab.found = [Found(PID, "outside")]
    lab.engines.set(SidecarOptions(allow_inject=True))
    lab.engines.look(0)
    lab.found = [Found(PID, "rings")]
    lab.engines.look(S)
    assert (lab.asked, attached) == (["resolve"], [])
    goes_on.set()
    lab.engines._injections.join(time.monotonic() + 60)
    lab.engines.look(2 * S)
    assert len(attached) == 1, (lab.asked, lab.lines, lab.engines.reasons())
