"""stdin, stdout and stderr closed, full or hung up on: no command breaks over that."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = shlex.quote(str(Path(sys.executable).with_name("dsagent")))
NO_PROCESS = "attach 3999999999"
PAGES = ("--help", "attach --help", "--version", "doctor", "doctor --json")


def sh(line: str, *, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    """`dsagent …` within a shell's line."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    if unbuffered:
        env["PYTHONUNBUFFERED"] = "1"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("dsagent", COMMAND)],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        check=False,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", [NO_PROCESS, "doctor --json", "why --help"])
def test_closed(arguments: str, closed: str) -> None:
    usual, ran = sh(f"dsagent {arguments}"), sh(f"dsagent {arguments} {closed}")
    assert ran.returncode == usual.returncode, ran.stderr
    assert ran.stdout == ("" if " >&-" in f" {closed}" else usual.stdout)
    assert ran.stderr == ("" if "2>&-" in closed else usual.stderr)


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("page", PAGES)
def test_a_full_disk_is_said(page: str, unbuffered: bool) -> None:
    ran = sh(f"dsagent {page} >/dev/full", unbuffered=unbuffered)
    assert ran.returncode == 1
    assert ran.stderr == "dsagent: cannot write the result: No space left on device\n"


def test_a_full_disk_behind_stderr_keeps_the_exit_code() -> None:
    assert sh(f"dsagent {NO_PROCESS} 2>/dev/full").returncode == 3
    assert sh(f"dsagent {NO_PROCESS} >/dev/full 2>/dev/full").returncode == 3
    assert json.loads(sh("dsagent doctor --json 2>/dev/full").stdout)["checks"]


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    ran = sh("dsagent doctor | true")
    assert (ran.returncode in (0, 1), ran.stderr) == (True, "")


@pytest.mark.parametrize("columns", ["0", "1", "19", "²", "-5", "x", "99999999999"])
def test_a_width_that_is_none_is_80(columns: str) -> None:
    plain, odd = sh("COLUMNS= dsagent doctor"), sh(f"COLUMNS={columns} LINES=² dsagent doctor")
    assert (odd.stdout, odd.stderr) == (plain.stdout, "")
