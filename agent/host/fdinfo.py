"""Another process's descriptors, where /proc/PID/fd may not be entered.

Its own user may enter that folder, and who holds CAP_DAC_READ_SEARCH, which a container's uid 0
has not. /proc/PID/fdinfo says enough of each descriptor, and who may trace the process may read it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import PROC, ProcessGone

MOST_FDS = 65_536
_WHERE = re.compile(rb"^mnt_id:\s*(\d+)\nino:\s*(\d+)$", re.MULTILINE)
_IO_URING = b"SqMask:"  # a line that only its rings have


@dataclass(frozen=True, slots=True)
class Descriptor:
    mount: int  # the id of the mount that its file lies on
    inode: int
    io_uring: bool


def descriptors(pid: int, proc: Path = PROC) -> Iterator[Descriptor]:
    """Raises ProcessGone, or PermissionError."""
    folder = proc / str(pid) / "fdinfo"
    for name in procfs.list_names(folder)[:MOST_FDS]:
        try:
            text = procfs.read_bytes(folder / name)
        except ProcessGone:
            continue  # closed meanwhile
        if (found := _WHERE.search(text)) is not None:
            yield Descriptor(int(found.group(1)), int(found.group(2)), _IO_URING in text)


def socket_inodes(pid: int, proc: Path = PROC) -> set[int]:
    """Of its sockets: all of them lie on one mount of the kernel's own, as ours do."""
    with socket.socket() as ours:
        text = procfs.read_bytes(PROC / "self" / "fdinfo" / str(ours.fileno()))
    here = _WHERE.search(text)
    if here is None:
        return set()
    mount = int(here.group(1))
    return {each.inode for each in descriptors(pid, proc) if each.mount == mount}
