"""`dsagent attach --instrument inject` and `dsagent detach`, on a process that is like one of
vLLM's: it has torch, and a real Starlette, whose hooks can be put in."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inject_lab as lab
import pytest

from dsagent.agent.errors import CANNOT_ATTACH, USAGE

COMMAND = str(Path(sys.executable).with_name("dsagent"))
HOOKED = "id(starlette.applications.Starlette.__dict__['__call__'])"


def dsagent(*arguments: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=lab.PATIENCE_S * 2,
        **{"stdin": subprocess.DEVNULL, **popen},
    )


@pytest.fixture
def target() -> Iterator[lab.PythonTarget]:
    with lab.PythonTarget("naps") as target:
        assert target.ask("!import torch") == "ok"
        yield target


def look(target: lab.PythonTarget) -> dict[str, Any]:
    return {
        "mapped": lab.mapped(target.pid),
        "descriptors": lab.descriptors(target.pid),
        "threads": lab.threads(target.pid),
        "modules": [name for name in target.ask("sorted(sys.modules)") if "dsagent" in name],
        "finders": target.ask("[id(each) for each in sys.meta_path]"),
        "kept": target.ask("[name for name in sys.__dict__ if 'dsagent' in name]"),
    }


def test_in_and_out_again(target: lab.PythonTarget) -> None:
    assert target.ask("!import starlette.applications") == "ok"
    before, original = look(target), target.ask(HOOKED)
    pid = str(target.pid)
    ran = dsagent("attach", pid, "--instrument", "inject", "--yes", "--duration", "1", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["engine"] == "vllm"
    assert "will pause for about" in ran.stderr
    assert "1 hooks; paused" in ran.stderr
    assert f"`dsagent detach {pid}` takes them out" in ran.stderr
    # The agent has ended, and the hooks have stayed.
    hooked = look(target)
    assert target.ask(HOOKED) != original
    assert hooked["kept"] == ["dsagent.injected"]
    assert hooked["modules"] == before["modules"]
    assert sum("dsagent.steps" in link for _, link in hooked["descriptors"]) > 0
    again = dsagent("attach", pid, "--instrument", "inject", "--yes", "--duration", "1")
    assert again.returncode == 0, again.stderr
    assert "there already; paused" in again.stderr

    out = dsagent("detach", pid, "--json")
    assert out.returncode == 0, out.stderr
    (process,) = json.loads(out.stdout)["processes"]
    assert (process["pid"], process["done"], process["failed"]) == (target.pid, "1 hooks", None)
    assert process["pause_ns"] > 0
    assert look(target) == before
    assert target.ask(HOOKED) == original
    target.goes_on()
    assert dsagent("detach", pid).returncode == USAGE


def test_detach_ends_the_agent(target: lab.PythonTarget) -> None:
    assert target.ask("!import starlette.applications") == "ok"
    before = look(target)
    argv = [COMMAND, "attach", str(target.pid), "--instrument", "inject", "--yes", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stderr is not None
            for line in agent.stderr:
                if line.startswith("attached to"):
                    break
            out = dsagent("detach", str(target.pid), "--json")
            assert out.returncode == 0, out.stderr
            assert json.loads(out.stdout)["agent_ended"]
            summary, _ = agent.communicate(timeout=lab.PATIENCE_S)
            assert agent.returncode == 0
            assert json.loads(summary)["uncounted_losses"] == 0
        finally:
            agent.kill()
    assert look(target) == before


def test_a_process_without_anything_to_hook_is_as_it_was(target: lab.PythonTarget) -> None:
    before = look(target)
    ran = dsagent("attach", str(target.pid), "--instrument", "inject", "--yes")
    assert ran.returncode == CANNOT_ATTACH
    assert "nothing to hook; paused" in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("dsagent: cannot inject: ")
    assert look(target) == before
    target.goes_on()


def test_all_or_none(target: lab.PythonTarget) -> None:
    """A child in which it fails; its parent, which came first, is restored."""
    assert target.ask("!import starlette.applications, subprocess") == "ok"
    broken = (
        "import torch, starlette.applications, os, sys\n"
        "os.memfd_create = None\n"  # no ring can be made
        "print('up', flush=True)\nsys.stdin.read()"
    )
    assert target.ask(
        f"!child = subprocess.Popen([sys.executable, '-c', {broken!r}], stdin=-1, stdout=-1)"
    )
    assert target.ask("child.stdout.readline().decode()") == "up\n"
    before, original = look(target), target.ask(HOOKED)
    ran = dsagent("attach", str(target.pid), "--instrument", "inject", "--yes")
    assert ran.returncode == CANNOT_ATTACH
    assert "1 hooks; paused" in ran.stderr
    assert "TypeError" in ran.stderr.splitlines()[-1]
    assert "no other process of the server has hooks" in ran.stderr.splitlines()[-1]
    assert look(target) == before
    assert target.ask(HOOKED) == original
    assert target.ask("!child.stdin.close(); child.wait()") == "ok"


def test_nobody_there_to_agree(target: lab.PythonTarget) -> None:
    before = look(target)
    ran = dsagent("attach", str(target.pid), "--instrument", "inject")
    assert ran.returncode == USAGE
    assert ran.stderr.splitlines()[-1] == ("dsagent: cannot inject: nobody has agreed; --yes does")
    assert look(target) == before


def test_somebody_who_says_no(target: lab.PythonTarget) -> None:
    before = look(target)
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [COMMAND, "attach", str(target.pid), "--instrument", "inject"],
            stdin=theirs,
            stderr=theirs,
        ) as process:
            seen = b""
            while b"Put the hooks in? [y/N]" not in seen:
                seen += os.read(ours, 4096)
            os.write(ours, b"n\n")
            while b"you said no" not in seen:
                seen += os.read(ours, 4096)
            assert process.wait(lab.PATIENCE_S) == USAGE
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"will pause for about" in seen
    assert look(target) == before


def test_no_vllm_there() -> None:
    with lab.PythonTarget("naps") as target:
        why = f"neither process {target.pid} nor one below it runs vLLM"
        ran = dsagent("attach", "--instrument", "inject", "--yes", str(target.pid))
        assert ran.returncode == CANNOT_ATTACH
        # Which engines run beside the tests, they do not know.
        assert re.fullmatch(rf"dsagent: cannot inject: {why}; (no engine|engines) .*\n", ran.stderr)
        ran = dsagent("detach", str(target.pid))
        assert ran.returncode == CANNOT_ATTACH
        assert ran.stderr == (f"dsagent: cannot detach: {why}, and no dsagent is attached there\n")


def test_the_agent_of_a_server_that_is_not_vllm_is_ended_too() -> None:
    with lab.PythonTarget("naps") as target:
        assert target.ask("!import http.server, threading") == "ok"
        serve = "http.server.HTTPServer(('127.0.0.1', 0), http.server.BaseHTTPRequestHandler)"
        assert target.ask(f"!server = {serve}") == "ok"
        pid = str(target.pid)
        attach = [COMMAND, "attach", pid, "--instrument", "outside", "--without", "kernel"]
        with subprocess.Popen(attach, stderr=subprocess.PIPE, text=True) as agent:
            try:
                assert agent.stderr is not None
                assert any("attached to" in line for line in agent.stderr)
                ran = dsagent("detach", pid)
                assert (ran.returncode, ran.stderr) == (0, "the agent has ended\n")
                assert agent.wait(lab.PATIENCE_S) == 0
            finally:
                agent.kill()
