"""What promtool says of generated rules and their tests."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dsagent.dashboards.rules import RULES, TESTS, write

TIMEOUT_S = 300
MAX_LINES = 20


def promtool_errors(texts: Mapping[str, str]) -> list[str] | None:
    """One line each; None where there is no promtool."""
    promtool = shutil.which("promtool")
    if promtool is None:
        return None
    with tempfile.TemporaryDirectory(prefix="dsagent-slo-") as folder:
        write(texts, Path(folder))
        for arguments in (("check", "rules", RULES), ("test", "rules", TESTS)):
            errors = _errors([promtool, *arguments], folder)
            if errors:
                return errors
    return []


def _errors(command: list[str], folder: str) -> list[str]:
    what = " ".join(["promtool", *command[1:]])
    try:
        ran = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return [f"{what}: took longer than {TIMEOUT_S} s"]
    output = ran.stdout + ran.stderr
    if ran.returncode == 0 and "FAILED" not in output:
        return []
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    return [f"{what}: {line}" for line in lines[:MAX_LINES]] or [f"{what}: {ran.returncode}"]
