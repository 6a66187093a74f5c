"""The long runs, cut short: DSAGENT_SOAK_MINUTES says how short (`make soak` takes an hour)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_lab import require_kernel_source

HERE = Path(__file__).resolve().parent
MINUTES = float(os.environ.get("DSAGENT_SOAK_MINUTES", "2"))
BEYOND_S = 240  # for starting, the last rounds, and the questions after them

pytestmark = pytest.mark.ebpf


def ran(*command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Ended by a signal that it can clean up after, where it takes too long."""
    done = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = done.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        done.send_signal(2)
        out, err = done.communicate(timeout=60)
        raise AssertionError(f"{command} took more than {timeout_s:.0f} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, done.returncode, out, err)


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], check=False)
    if tried.returncode != 0:
        pytest.skip("no namespaces can be had here")


@pytest.mark.nightly
@pytest.mark.timeout(MINUTES * 60 + BEYOND_S + 60)
def test_nothing_grows_is_lost_or_does_not_add_up(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = (str(HERE / "soak.py"), "--minutes", str(MINUTES), "--out", str(out))
    done = ran(*command, timeout_s=MINUTES * 60 + BEYOND_S)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    document = json.loads(out.read_text())
    assert document["faults"] == []
    # It did happen, and was seen.
    assert document["requests"]["explained"] > 100
    assert document["done"]["engine_killed"] >= 1
    assert document["otlp"]["items"]["traces"] > 0
    assert document["otlp"]["outages"] >= 1
    assert max(value for _, value in document["samples"]["BPF progs"]) > 0


@pytest.mark.timeout(600)
def test_the_sidecar_changes_nothing_in_the_pod(tmp_path: Path) -> None:
    out = tmp_path / "uninstall.json"
    done = ran(
        str(HERE / "uninstall_check.py"), "--restarts", "1", "--out", str(out), timeout_s=540
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
