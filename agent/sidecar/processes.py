"""What identifies a process, and what says that it runs another program now."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.facts import Target
from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import PROC, ProcessGone
from dsagent.agent.host.target import MAX_COMMAND_BYTES, VLLM_TITLE, vllm_root

MAX_COMMAND_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Key:
    """A pid is given to others later, and means another process in another namespace."""

    pid: int
    start_ticks: int
    pid_namespace: int

    @classmethod
    def of(cls, target: Target) -> Key:
        return cls(target.pid, target.start_ticks, target.pid_namespace)


def program_mark(pid: int, proc: Path = PROC) -> str:
    """Changes with each exec of the process, and with nothing else: the auxiliary vector holds
    addresses that are drawn anew each time. Empty where it cannot be read."""
    folder = proc / str(pid)
    try:
        seen = os.stat(folder / "exe")
        vector = procfs.read_bytes(folder / "auxv")
    except (OSError, ProcessGone):
        return ""
    if not vector:
        return ""
    return f"{seen.st_dev}:{seen.st_ino}:{hashlib.sha256(vector).hexdigest()}"


def command_text(pid: int, proc: Path = PROC) -> str:
    """Its command line with blanks between the words, bounded; as it was given, not escaped."""
    return " ".join(procfs.command_line(pid, proc, MAX_COMMAND_BYTES))[:MAX_COMMAND_CHARS]


def is_left_over(pid: int, proc: Path = PROC) -> bool:
    """Whether one of vLLM's inner processes has outlived those that started it, and is now below
    the first process of the pod: it ends as soon as it has noticed."""
    try:
        return procfs.read_stat(vllm_root(pid, proc), proc).comm.startswith(VLLM_TITLE)
    except (ProcessGone, PermissionError):
        return False
