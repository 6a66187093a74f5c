"""How a test runs one of the long runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kernel_lab import require_kernel_source


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


def require_namespaces() -> None:
    """And the kernel source: skips the test, or fails it, where they cannot be had."""
    require_kernel_source()
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], check=False)
    if tried.returncode != 0:
        pytest.skip("no namespaces can be had here")
