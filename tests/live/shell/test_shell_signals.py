"""Ctrl-C and SIGTERM at any moment: quiet, with the exit code that a shell expects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from shell_lab import COMMAND, Agent, Child, Engine

SIGNALS = [signal.SIGINT, signal.SIGTERM]

# The signal comes while a module is looked for, which is where a start spends its time.
AT_IMPORT = """
import os, sys
from importlib.abc import MetaPathFinder
class Tripwire(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ["AT_IMPORT_OF"]:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
sys.meta_path.insert(0, Tripwire())
from dsagent.agent.cli import main
main()
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", ["dsagent.agent.streams", "typer", "dsagent.agent.session"])
def test_while_it_starts(module: str, number: signal.Signals) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", AT_IMPORT, "attach", str(os.getpid())],
        env={**os.environ, "AT_IMPORT_OF": module, "SIGNAL": str(int(number))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + number, "", "")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_demo_whose_engine_starts(number: signal.Signals) -> None:
    with Child([COMMAND, "demo", "--model", "tiny-llama"]) as demo:
        demo.wait_line(lambda line: line.startswith("starting the bundled engine"))
        demo.signal(number)
        assert demo.wait() == 128 + number
        assert (demo.out, len(demo.err)) == ([], 1)


# The second signal comes while the first is still being obeyed, or when all is done.
TWICE = """
import os, signal, sys
from dsagent.agent.screens.terminal import stopping_on_signals
number = int(sys.argv[1])
stopped = []
with stopping_on_signals(lambda: stopped.append(1)):
    os.kill(os.getpid(), number)
    assert stopped == [1]
    if sys.argv[2] == "within":
        os.kill(os.getpid(), number)
os.kill(os.getpid(), number)
print("it went on")
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("when", ["within", "after"])
def test_the_second_of_a_kind_ends_it_at_once(number: signal.Signals, when: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TWICE, str(int(number)), when],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + number, "", "")


def test_both_at_once_while_attached() -> None:
    """Whichever of them comes second may find it at work, or ended: never a traceback."""
    with Engine() as engine, Agent(engine.pid, "--json") as agent:
        agent.attached()
        agent.signal(signal.SIGINT)
        agent.signal(signal.SIGINT)
        assert agent.wait() in (0, 130, -signal.SIGINT)  # the last: Python has as good as exited
        assert "Traceback" not in "".join(agent.err)
