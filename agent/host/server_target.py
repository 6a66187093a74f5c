"""The target where there are no rings: a process tree that serves HTTP, seen from outside.

The target is the process asked for if it listens, else its nearest ancestor of the
same program, or its nearest descendant, that does; and above that one whoever
shares its listening socket, as the parent of several API servers does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from dsagent.agent.facts import Target
from dsagent.agent.host import procfs
from dsagent.agent.host.clock import check_time_namespace
from dsagent.agent.host.procfs import PROC, ProcessGone
from dsagent.agent.host.sockets import listening
from dsagent.agent.host.target import NotAnEngine, NothingThere, describe, resolve_starting

Instrument = Literal["auto", "plugin", "inject", "outside"]


def find_target(pid: int, instrument: Instrument, say: Callable[[str], None]) -> Target:
    """The target that `pid` belongs to, by the way in that was asked for: *auto* takes the rings
    where there are any, and looks from outside otherwise. Raises DsagentError (exit 3)."""
    if instrument == "outside":
        return resolve_server(pid)
    try:
        return resolve_starting(pid, say)
    except NotAnEngine:
        if instrument != "auto":
            raise
        root = _server(procfs.process_of(pid))
        if root is None:
            raise
    return _describe(root)


def resolve_server(pid: int, proc: Path = PROC) -> Target:
    """Raises DsagentError with exit code 3 and the reason."""
    pid = procfs.process_of(pid, proc)
    try:
        comm = procfs.read_stat(pid, proc).comm
    except ProcessGone as error:
        raise NothingThere(f"cannot attach: there is no process {pid}") from error
    root = _server(pid, proc)
    if root is None:
        raise NothingThere(
            f"cannot attach: process {pid} ({comm}) is no server: neither it nor one above or "
            "below it listens on a TCP port"
        )
    return _describe(root, proc)


def _describe(root: int, proc: Path = PROC) -> Target:
    check_time_namespace(root, proc)
    return describe(root, proc, engine="http")


def _server(pid: int, proc: Path = PROC) -> int | None:
    """The root of the server that `pid` belongs to; None where it belongs to none."""
    parent_of = procfs.parents(proc)
    near = (pid, *_of_one_program(pid, parent_of, proc), *procfs.descendants(pid, parent_of))
    if _is_vllm_worker(pid, proc):  # it may listen for its ranks, but it is not who serves
        near = near[1:]
    for each in near:
        sockets = {one.inode for one in listening(each, proc)}
        if sockets:
            break
    else:
        return None
    root = each
    for above in procfs.ancestors(root, parent_of):
        if not sockets & {one.inode for one in listening(above, proc)}:
            break
        root = above
    return root


def _of_one_program(pid: int, parent_of: dict[int, int], proc: Path) -> list[int]:
    """The ancestors, nearest first, as long as they run the same executable: what started them
    all, a login's sshd, say, may listen too."""
    own = _executable(pid, proc)
    found = []
    for above in procfs.ancestors(pid, parent_of):
        if own is None or _executable(above, proc) != own:
            break
        found.append(above)
    return found


def _executable(pid: int, proc: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(proc / str(pid) / "exe")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_vllm_worker(pid: int, proc: Path) -> bool:
    try:
        return procfs.read_stat(pid, proc).comm.startswith("VLLM::")
    except (ProcessGone, PermissionError):
        return False
