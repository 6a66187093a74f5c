"""What cannot be seen from outside: ciphers, and calls that go through rings of io_uring."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dsagent.agent.host import fdinfo, procfs
from dsagent.agent.host.procfs import PROC, ProcessGone

MOST_FDS = 65_536
_IO_URING = "anon_inode:[io_uring]"


def rings_of_io_uring(pids: Iterable[int], proc: Path = PROC) -> int:
    """How many rings of io_uring these processes have open."""
    found = 0
    for pid in pids:
        folder = proc / str(pid) / "fd"
        try:
            names = procfs.list_names(folder)[:MOST_FDS]
        except PermissionError:
            found += _of_another_user(pid, proc)
            continue
        except ProcessGone:
            continue
        for name in names:
            try:
                found += os.readlink(folder / name) == _IO_URING
            except OSError:
                continue  # closed meanwhile
    return found


def _of_another_user(pid: int, proc: Path) -> int:
    try:
        return sum(each.io_uring for each in fdinfo.descriptors(pid, proc))
    except (ProcessGone, PermissionError):
        return 0


def sentence(ciphered: int, unread: int, rings: int, lost: int) -> str:
    """What to say of it; empty where all was seen."""
    parts = []
    if ciphered:
        parts.append(f"{ciphered} connections are ciphered (TLS): their requests are not seen")
    if unread:
        parts.append(f"{unread} messages went through calls that are not looked at")
    if rings:
        parts.append(f"{rings} rings of io_uring are open: what goes through them is not seen")
    if lost:
        parts.append(f"{lost} messages could not be told apart")
    return "; ".join(parts)
