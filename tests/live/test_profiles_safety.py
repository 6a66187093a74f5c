"""What sampling leaves behind when its agent is killed, and what a back end that hangs costs."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pyroscope_recorder import recording
from shell_lab import Agent, Child, Engine

from dsagent.agent.host import procfs

PATIENCE_S = 60.0
ENGINE = str(Path(__file__).parent / "shell" / "shell_engine.py")
# The engine of the shell's tests, with a thread that computes: there is something to be seen.
BUSY = """
import runpy, sys, threading, time
def computes():
    while True:
        sum(range(20_000))
        time.sleep(0.0005)
threading.Thread(target=computes, daemon=True).start()
sys.argv = [sys.argv[1], "3"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.05)


def samplers(pid: int) -> list[int]:
    """The py-spy processes below it."""
    found = []
    for each in procfs.descendants(pid, procfs.parents()):
        try:
            if procfs.read_stat(each).comm == "py-spy":
                found.append(each)
        except procfs.ProcessGone:
            continue
    return found


def runs(pid: int) -> bool:
    try:
        return procfs.read_stat(pid).comm == "py-spy" and procfs.read_stat(pid).state != "Z"
    except procfs.ProcessGone:
        return False


def test_killed_it_leaves_no_sampler() -> None:
    with recording() as recorder, Engine() as engine:
        with Agent(engine.engine_pid, "--pyroscope", recorder.url) as agent:
            agent.attached()
            wait_until("a run of py-spy", lambda: bool(samplers(agent.pid)))
            (sampler,) = samplers(agent.pid)
            agent.signal(signal.SIGKILL)
            agent.wait()
            wait_until("the end of py-spy", lambda: not runs(sampler))
        os.kill(engine.engine_pid, 0)  # the engine is there as before


def test_a_back_end_that_hangs_does_not_hold_up_the_session() -> None:
    with socket.socket() as listener, Child([sys.executable, "-c", BUSY, ENGINE]) as engine:
        pid = int(engine.wait_line(lambda line: line.startswith("ready")).split()[1])
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)  # takes connections, and never answers
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Agent(pid, "--pyroscope", url, "--max-overhead", "50%", "--json") as agent:
            agent.attached()
            wait_until("a run of py-spy", lambda: bool(samplers(agent.pid)))
            wait_until("its end", lambda: not samplers(agent.pid))
            agent.signal(signal.SIGINT)
            assert agent.wait() == 0
            document = agent.document()
    (sink,) = (each for each in document["sinks"] if each["name"] == "pyroscope")
    assert sink["made"] >= 1
    assert sink["acknowledged"] == 0
    assert sink["made"] == sink["failed"] + sink["dropped"]
    assert document["uncounted_losses"] == 0
