"""What a pod is to the processes in it: a pid namespace and a network of their own.

In there the sidecar sees the engines of the test and no others, without being told which, and has
the socket of its name to itself. Nothing outlives the pod: the end of its first process ends all.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shell_lab import COMMAND, PATIENCE_S
from sidecar_lab import Sidecar

from dsagent.agent.host import procfs

# The first process: it starts the sidecar, and reaps what nobody else does, as the pause container.
FIRST = """
import os, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
sidecar = subprocess.Popen(sys.argv[1:])
while True:
    pid, status = os.wait()
    if pid == sidecar.pid:
        sys.exit(os.waitstatus_to_exitcode(status))
"""
UNSHARE = ("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
CLONE_NEWNET = 0x40000000


class PodSidecar(Sidecar):
    """`dsagent sidecar …` in a pod of its own; `under` stands before what is to run beside it."""

    def __init__(self, *flags: str) -> None:
        super().__init__(*flags, under=(*UNSHARE, sys.executable, "-c", FIRST))
        # Nearest first: the pod's first process, and the sidecar that it has started.
        self.first, self.sidecar_pid, *_ = procfs.descendants(self.pid, procfs.parents())
        self.under = ("nsenter", "--target", str(self.first), "--net", "--pid", "--mount", "--wd=.")

    def __enter__(self) -> PodSidecar:
        return self

    def dsagent(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec` would run it."""
        return subprocess.run(
            [*self.under, COMMAND, *argv],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    @contextmanager
    def network(self) -> Iterator[None]:
        """This thread is in the pod's network: what it connects to is there."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        theirs = os.open(f"/proc/{self.first}/ns/net", os.O_RDONLY)
        try:
            _set_network(theirs)
            try:
                yield
            finally:
                _set_network(own)
        finally:
            os.close(own)
            os.close(theirs)


def _set_network(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def inside(pid: int) -> int:
    """The number that a process of the pod has in there."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise AssertionError(f"no NSpid of {pid}")


def require_namespaces() -> None:
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs namespaces of its own: {tried.stderr.decode()[:200]}")
