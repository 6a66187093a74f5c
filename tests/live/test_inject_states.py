"""Code put into real Python processes, whatever their main thread is at: it runs, the process goes
on with what it did, and nothing is left of it."""

from __future__ import annotations

import re
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import inject_lab as lab
import pytest

from dsagent.agent.inject import code, text
from dsagent.agent.inject.injection import run_inside
from dsagent.agent.inject.interpreter import CannotInject

SOURCE = """
import sys, threading
sys.modules["__main__"].inside.append(threading.current_thread() is threading.main_thread())
REPORT = "put"
"""


def put(target: lab.PythonTarget) -> None:
    before = len(target.ask("inside"))
    outcome = run_inside(target.pid, SOURCE)
    assert outcome.report is not None
    assert (outcome.report.well, outcome.report.message) == (True, "put")
    assert target.ask("inside") == [True] * (before + 1)
    assert outcome.stopped_ns > 0


@pytest.mark.parametrize("state", ["naps", "busy", "in_c", "threads"])
def test_a_process_that_computes(state: str) -> None:
    with lab.PythonTarget(state) as target:
        put(target)
        target.goes_on()
        put(target)
        target.goes_on()
        assert target.ask("!done = True") in ("ok", ["over", None])
        assert target.ask("broken") in (0, "ok", ["over", None])


WAKE = {
    "epoll": ("!ours.send(b'x')", 1),
    "poll": ("!ours.send(b'x')", 1),
    "select": ("!ours.send(b'x')", 1),
    "recv": ("!ours.send(b'x')", "x"),
    "queue": ("!items.put('it')", "it"),
    "queue_with_limit": ("!items.put('it')", "it"),
    "event": ("!event.set()", True),
    "join": ("!event.set()", None),
}


@pytest.mark.parametrize("state", WAKE)
def test_a_process_that_waits_for_ever(state: str) -> None:
    """The code runs although nothing wakes the main thread, and what that waits for still comes."""
    with lab.PythonTarget(state) as target:
        put(target)
        put(target)
        wake, comes = WAKE[state]
        lines = [target.ask(wake), target.next_line()]
        assert "ok" in lines
        assert ["over", comes] in lines


def test_a_sleep_is_not_cut_short() -> None:
    with lab.PythonTarget("sleeps") as target:
        put(target)
        assert target.next_line() == ["over", True]


def test_a_server_serves_throughout() -> None:
    with (
        lab.PythonTarget("echoes") as target,
        socket.create_connection(("127.0.0.1", target.ask("port"))) as client,
        client.makefile("rwb", buffering=0) as lines,
    ):
        for number in range(5):
            put(target)
            lines.write(b"%d\n" % number)
            assert lines.readline() == b"%d\n" % number


def test_nothing_is_left() -> None:
    with lab.PythonTarget("naps") as target:
        put(target)  # what Python loads lazily is there now
        modules, names = target.ask("sorted(sys.modules)"), target.ask("sorted(globals())")
        before = [look(target.pid) for look in (lab.mapped, lab.descriptors, lab.threads)]
        put(target)
        after = [look(target.pid) for look in (lab.mapped, lab.descriptors, lab.threads)]
        assert after == before
        assert code.BLOCK_BYTES + text.MAX_TEXT_BYTES not in lab.anonymous_sizes(target.pid)
        assert target.ask("sorted(sys.modules)") == modules
        assert target.ask("sorted(globals())") == names


def test_registers_are_restored() -> None:
    """Arithmetic in five threads, cut into a hundred times four."""
    with lab.PythonTarget("threads") as target:
        for _ in range(100):
            assert run_inside(target.pid, "REPORT = ''").report is not None
        target.goes_on()
        assert target.ask("broken") == 0


def test_the_processors_modes_are_restored() -> None:
    """Also of a thread that makes no system call: it is stopped in the middle of its loop."""
    with lab.PythonTarget("in_machine_code") as target:
        lab.until(lambda: _computes(target.pid))
        queued = threading.Event()

        def notice(stage: str) -> None:
            if stage == "call: let go":
                queued.set()

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run_inside, target.pid, SOURCE, on_stage=notice)
            assert queued.wait(lab.PATIENCE_S)
            lines = [target.ask("!flag.value = 1"), target.next_line()]
            assert running.result(lab.PATIENCE_S).report is not None
        assert ["over", 0x5F80] in lines


@pytest.mark.parametrize("python", lab.other_interpreters())
def test_other_versions(python: str) -> None:
    minor = int(re.search(r"3\.(\d+)$", python).group(1))  # type: ignore[union-attr]
    for state in ("naps", "queue", "epoll"):
        with lab.PythonTarget(state, python) as target:
            if 9 <= minor <= 13:
                put(target)
            else:
                with pytest.raises(CannotInject, match=rf"Python of version 3.{minor}; known are"):
                    run_inside(target.pid, SOURCE)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ValueError('as it\\nhappens')", "ValueError: as it\\nhappens"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def", "SyntaxError: .*"),
        ("import dsagent_is_not_there", "ModuleNotFoundError: .*"),
        ("class E(Exception):\n def __str__(self): 1/0\nraise E", "an exception that cannot be.*"),
    ],
)
def test_what_goes_wrong_in_it_is_told_and_stays_there(source: str, message: str) -> None:
    with lab.PythonTarget("naps", stderr=subprocess.PIPE) as target:
        report = run_inside(target.pid, source).report
        assert report is not None
        assert not report.well
        assert re.fullmatch(message.replace("\\", "\\\\"), report.message)
        target.goes_on()
        put(target)
        target.process.kill()
        assert target.process.stderr is not None
        with target.process.stderr as stderr:
            assert stderr.read() == ""


def test_a_text_that_is_too_long() -> None:
    with lab.PythonTarget("naps") as target:
        with pytest.raises(ValueError, match="allowed"):
            run_inside(target.pid, "#" * (64 << 10))
        assert code.BLOCK_BYTES + text.MAX_TEXT_BYTES not in lab.anonymous_sizes(target.pid)
        put(target)


def test_one_that_does_not_get_to_it_in_time_is_made_to_do_nothing() -> None:
    with lab.PythonTarget("long_in_c") as target:
        lab.until(lambda: _computes(target.pid))
        with pytest.raises(CannotInject, match="has not come to run it"):
            run_inside(target.pid, SOURCE, timeout_s=0.0)
        assert target.ask("ticks") == 0
        target.goes_on()
        assert target.ask("inside") == []
        put(target)


def test_of_one_that_begins_just_as_it_is_given_up_nothing_is_claimed() -> None:
    with lab.PythonTarget("long_in_c") as target:
        lab.until(lambda: _computes(target.pid))

        def let_it_run(stage: str) -> None:
            if stage == "give up: waits":
                lab.until(lambda: target.ask("inside") == [True])

        with pytest.raises(CannotInject, match="whether it ran is unknown"):
            run_inside(target.pid, SOURCE, timeout_s=0.0, on_stage=let_it_run)
        put(target)


def _computes(pid: int) -> bool:
    with open(f"/proc/{pid}/task/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "R"
