"""The injector is killed at each of its stages, and at any moment: the target goes on."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time

import inject_lab as lab
import pytest

from dsagent.agent.inject.injection import run_inside

# Each in the order of an injection.
STAGES = [
    *(f"map: {what}" for what in ("stopped", "written", "set", "let go")),
    "write",
    *(f"call: {what}" for what in ("stopped", "written", "set", "let go")),
    *(f"unmap: {what}" for what in ("stopped", "written", "set", "let go")),
    "clear: stopped",
]
RUNS_ANYWAY = STAGES[STAGES.index("call: set") :]

INJECTOR = """
import os, signal, sys
from dsagent.agent.inject.injection import run_inside
def on_stage(stage):
    if stage == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
print("begins", flush=True)
run_inside(int(sys.argv[1]), "import sys\\nsys.modules['__main__'].inside.append(True)",
           on_stage=on_stage)
"""


def injector(pid: int, kill_at: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", INJECTOR, str(pid), kill_at],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_traced(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as status:
        return re.search(r"^TracerPid:\s+0$", status.read(), re.MULTILINE) is None


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("state", ["naps", "queue"])
def test_killed_at_a_stage(state: str, stage: str) -> None:
    with lab.PythonTarget(state) as target:
        with injector(target.pid, stage) as killed:
            _, errors = killed.communicate(timeout=lab.PATIENCE_S)
            assert killed.returncode == -signal.SIGKILL, errors
        assert not is_traced(target.pid)
        if stage in RUNS_ANYWAY:
            lab.until(lambda: target.ask("inside") == [True])
        if state == "queue":
            lines = [target.ask("!items.put('it')"), target.next_line()]
            assert ["over", "it"] in lines
        else:
            target.goes_on()
            assert target.ask("broken") == 0
            assert len(target.ask("inside")) == (stage in RUNS_ANYWAY)
            outcome = run_inside(target.pid, "REPORT = 'again'")  # and it can be done again
            assert outcome.report is not None
            assert outcome.report.message == "again"


def test_killed_at_any_moment() -> None:
    chance = random.Random(7)
    with lab.PythonTarget("threads") as target:
        for _ in range(25):
            with injector(target.pid, "never") as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "begins\n"
                time.sleep(chance.uniform(0, 0.08))  # wherever that is
                process.kill()
                process.communicate(timeout=lab.PATIENCE_S)
            assert not is_traced(target.pid)
            target.goes_on()
        assert target.ask("broken") == 0


def test_signals_that_come_meanwhile_are_handled() -> None:
    with lab.PythonTarget("naps") as target:
        target.ask("!import signal; seen = []")
        # Handlers can be set by the main thread only: the injected code does it.
        set_handler = "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: (sys.modules"
        set_handler += "['__main__'].seen.append(1)))\nREPORT = 'set'"
        outcome = run_inside(target.pid, set_handler)
        assert outcome.report is not None
        assert outcome.report.message == "set"
        for number in range(1, 31):

            def send(stage: str) -> None:
                if stage == "call: stopped":
                    os.kill(target.pid, signal.SIGUSR1)

            run_inside(target.pid, "REPORT = ''", on_stage=send)
            lab.until(lambda number=number: len(target.ask("seen")) == number)  # type: ignore[misc]
        target.goes_on()
