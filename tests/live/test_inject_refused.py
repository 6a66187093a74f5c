"""What must not, or cannot, be injected into: one clear line, and nothing touched."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import inject_lab as lab
import pytest

from dsagent.agent.errors import CANNOT_ATTACH
from dsagent.agent.inject import injection
from dsagent.agent.inject.injection import run_inside
from dsagent.agent.inject.interpreter import CannotInject

SLEEPER = [sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(600)"]


def refused(pid: int) -> str:
    with pytest.raises(CannotInject) as caught:
        run_inside(pid, "raise AssertionError")
    text = str(caught.value)
    assert text.startswith("cannot inject: ")
    assert "\n" not in text
    assert caught.value.exit_code == CANNOT_ATTACH
    return text


@contextmanager
def child(argv: list[str], **popen: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, **popen)  # type: ignore[call-overload]
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_is_traced_already() -> None:
    tracer = (
        "import sys\nfrom dsagent.agent.inject.ptrace import Tracee\n"
        "tracee = Tracee(int(sys.argv[1]))\nprint('ready', flush=True)\nsys.stdin.read()"
    )
    with lab.PythonTarget("naps") as target:
        argv = [sys.executable, "-c", tracer, str(target.pid)]
        with child(argv, stdin=subprocess.PIPE) as debugger:
            assert debugger.stdout is not None
            assert debugger.stdout.readline() == b"ready\n"
            assert f"is traced already, by process {debugger.pid}" in refused(target.pid)
        target.goes_on()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a pid namespace")
def test_another_pid_namespace() -> None:
    with child(["unshare", "--pid", "--fork", "--kill-child", *SLEEPER]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
            inner = int(children.read().split()[0])
        assert "is in another pid namespace; run dsagent inside" in refused(inner)


def test_one_that_gets_no_memory() -> None:
    with lab.PythonTarget("naps") as target:
        with open(f"/proc/{target.pid}/statm") as statm:
            now_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        before = lab.mapped(target.pid)
        unlimited = resource.prlimit(target.pid, resource.RLIMIT_AS, (now_bytes, -1))
        assert "was given no memory for it: its address space is limited" in refused(target.pid)
        resource.prlimit(target.pid, resource.RLIMIT_AS, unlimited)
        target.goes_on()
        assert lab.mapped(target.pid) == before
        assert run_inside(target.pid, "REPORT = 'well'").report is not None


def test_one_that_waits_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has not come to it yet when it is looked at, it is waited for."""
    monkeypatch.setattr(injection, "_STEP_TIMEOUT_S", 0.0)
    cpu = min(os.sched_getaffinity(0))
    with (
        lab.PythonTarget("naps") as target,
        child([sys.executable, "-c", "print(flush=True)\nwhile True: pass"]) as hog,
    ):
        assert hog.stdout is not None
        assert hog.stdout.readline() == b"\n"
        before = lab.mapped(target.pid)
        os.setpriority(os.PRIO_PROCESS, target.pid, 10)  # a tenth of the CPU is left for it
        for pid in (target.pid, hog.pid):
            os.sched_setaffinity(pid, {cpu})
        for _ in range(5):
            assert run_inside(target.pid, "REPORT = 'well'").report is not None
        assert lab.mapped(target.pid) == before


def test_no_python() -> None:
    with child(["sleep", "600"]) as process:
        lab.until(lambda: os.readlink(f"/proc/{process.pid}/exe").endswith("sleep"))
        assert "is no Python interpreter that is known here" in refused(process.pid)


def test_a_stopped_process() -> None:
    with lab.PythonTarget("naps") as target:
        os.kill(target.pid, signal.SIGSTOP)
        lab.until(lambda: _state(target.pid) == "T")
        assert "is stopped" in refused(target.pid)
        os.kill(target.pid, signal.SIGCONT)
        target.goes_on()


def test_a_process_that_is_stopped_just_then() -> None:
    with lab.PythonTarget("naps") as target:
        asked = []

        def stop(stage: str) -> None:
            if stage == "write":
                os.kill(target.pid, signal.SIGSTOP)
                lab.until(lambda: _state(target.pid) == "T")
            asked.append(stage)

        with pytest.raises(CannotInject, match="is stopped by SIGSTOP"):
            run_inside(target.pid, "raise AssertionError", on_stage=stop)
        os.kill(target.pid, signal.SIGCONT)
        target.goes_on()
        assert run_inside(target.pid, "REPORT = 'well'").report is not None


def test_one_that_ended_or_never_was() -> None:
    with child(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert "has ended" in refused(process.pid)
    assert "there is no process" in refused(process.pid)


def test_one_that_ends_meanwhile() -> None:
    for stage in ("map: let go", "write", "call: stopped", "call: set"):
        with lab.PythonTarget("naps") as target:

            def end(now: str, stage: str = stage, target: lab.PythonTarget = target) -> None:
                if now == stage:
                    target.process.kill()

            with pytest.raises(CannotInject, match="cannot inject: "):
                run_inside(target.pid, "REPORT = ''", on_stage=end)


def test_one_that_executes_another_program_meanwhile() -> None:
    """The new program is not written to."""
    with lab.PythonTarget("naps") as target:

        def execute(stage: str) -> None:
            if stage == "write":
                assert target.process.stdin is not None
                target.process.stdin.write("!os.execlp('sleep', 'sleep', '600')\n")
                target.process.stdin.flush()
                lab.until(lambda: os.readlink(f"/proc/{target.pid}/exe").endswith("sleep"))

        with pytest.raises(CannotInject, match="cannot inject: "):
            run_inside(target.pid, "REPORT = ''", on_stage=execute)
        lab.until(lambda: _state(target.pid) == "S")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_no_permission() -> None:
    """As somebody else, without capabilities."""
    program = (
        "import os, sys\nfrom dsagent.agent.inject.injection import run_inside\n"
        "from dsagent.agent.inject.interpreter import CannotInject\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try:\n    run_inside(int(sys.argv[1]), '')\n"
        "except CannotInject as error:\n    print(error)"
    )
    with lab.PythonTarget("naps") as target:
        ran = subprocess.run(
            [sys.executable, "-c", program, str(target.pid)],
            check=True,
            capture_output=True,
            text=True,
        )
        assert f"not permitted to trace process {target.pid}" in ran.stdout
        assert "CAP_SYS_PTRACE is needed" in ran.stdout


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
