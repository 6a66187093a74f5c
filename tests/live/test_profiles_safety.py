"""What sampling leaves behind when its agent is killed, and what a back end that hangs costs."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

from pyroscope_recorder import recording
from shell_lab import Agent, Engine

from dsagent.agent import procfs

PATIENCE_S = 60.0


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
    with socket.socket() as listener, Engine() as engine:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)  # takes connections, and never answers
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Agent(engine.engine_pid, "--pyroscope", url, "--json") as agent:
            agent.attached()
            wait_until("a run of py-spy", lambda: bool(samplers(agent.pid)))
            wait_until("its end", lambda: not samplers(agent.pid))
            engine.do("step 5")
            agent.signal(signal.SIGINT)
            assert agent.wait() == 0
            document = agent.document()
    (sink,) = (each for each in document["sinks"] if each["name"] == "pyroscope")
    assert sink["made"] >= 1
    assert sink["acknowledged"] == 0
    assert sink["made"] == sink["failed"] + sink["dropped"]
    assert document["uncounted_losses"] == 0
