"""`make demo-stack`, whole: a violation, its end, silence, and the agent's death, as a web hook was
told of them, by the agent and by a real Prometheus and Alertmanager. It leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "scripts" / "demo_stack")]
LIMIT_S = 540  # its own waits are bounded; this ends only one that hangs
MARK = "DEMO_STACK_TEST"
ACTS = ["long prefills", "the culprit stops", "all load stops", "the agent is killed"]

needs_servers = pytest.mark.skipif(
    not all(map(shutil.which, ("prometheus", "prometheus-alertmanager"))),
    reason="no prometheus or no alertmanager here (as root: bash scripts/setup.sh)",
)


def marked(mark: str) -> list[str]:
    """The processes that carry it in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            is_ours = process.name.isdecimal() and mark.encode() in (
                (process / "environ").read_bytes()
            )
            if is_ours:
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is nobody's
            continue
    return found


@needs_servers
@pytest.mark.ebpf
@pytest.mark.smollm2
@pytest.mark.timeout(LIMIT_S + 30)
def test_all_four_are_told_as_they_must_be(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    ran = subprocess.run(  # what it says on the way is pytest's to show, even if it hangs
        [*COMMAND, "--json"],
        env={**os.environ, "TMPDIR": str(tmp_path), MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0, ran.stdout
    document = json.loads(ran.stdout)
    assert [act["act"] for act in document["acts"]] == ACTS
    assert document["held"]
    assert set(document["alert_after_s"]) == {"agent", "alertmanager"}
    assert all(0 < seconds <= 180 for seconds in document["alert_after_s"].values())
    assert document["calm_chats"] >= 60
    assert marked(mark) == []
    assert list(tmp_path.iterdir()) == []


@needs_servers
def test_ended_early_it_leaves_nothing_either(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    child = subprocess.Popen(
        [*COMMAND, "--model", "tiny-llama"],
        env={**os.environ, "TMPDIR": str(tmp_path), MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        assert any("chats alone" in line for line in child.stdout), "the engine never served"
        assert len(marked(mark)) == 2  # itself and the engine
        child.send_signal(signal.SIGTERM)
        assert child.wait(150) == 130
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert marked(mark) == []
    assert list(tmp_path.iterdir()) == []


def test_without_the_servers_it_says_what_to_do(tmp_path: Path) -> None:
    """Before anything else is started."""
    ran = subprocess.run(
        COMMAND,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 1
    assert "scripts/setup.sh" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stdout == ""
