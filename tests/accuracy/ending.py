"""The end of a child that ends by its own clock."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

GRACE_S = 10.0  # beyond its own end, until it is ended


def end(child: subprocess.Popen[str], seconds: float) -> None:
    """Waits for the child's own end after `seconds`, and not for ever: one that the kernel gives
    nothing of its CPU, or that is held, does not see its time go by. Says how it was found."""
    try:
        child.wait(seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        seen = _state(child.pid)
        child.kill()
        child.wait(GRACE_S)
        print(f"a child of {seconds:.1f} s did not end by itself: {seen}", file=sys.stderr)
    finally:
        if child.stdout is not None:
            child.stdout.close()


def _state(pid: int) -> str:
    said = []
    for name in ("stat", "wchan", "schedstat", "syscall"):
        with suppress(OSError):
            said.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip()}")
    return "; ".join(said)
