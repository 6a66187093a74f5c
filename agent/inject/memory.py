"""The memory of another process: what is mapped where, bounded reads and writes.

One descriptor of /proc/PID/mem is kept: it stays with the memory that it was
opened on, so that a process which executes another program meanwhile is never
written to by mistake.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dsagent.agent.host.procfs import PROC, ProcessGone, read_bytes

MAX_READ_BYTES = 1 << 20
MAX_MAPPINGS = 65_536

_LINE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) ([0-9a-f]+:[0-9a-f]+) (\d+) *(.*)$", re.MULTILINE
)


class MemoryGone(Exception):  # noqa: N818 - what happened, not what went wrong
    """Nothing is mapped there, or the process has ended."""


@dataclass(frozen=True, slots=True)
class Mapping:
    start: int
    end: int
    permissions: str  # as "r-xp"
    offset: int  # in the file, bytes
    file: tuple[bytes, int] | None  # device and inode
    path: str


def mappings(pid: int, proc: Path = PROC) -> Iterator[Mapping]:
    """In the order of addresses. Raises ProcessGone, or PermissionError."""
    text = _maps_text(proc / str(pid) / "maps")
    for count, found in enumerate(_LINE.finditer(text)):
        if count >= MAX_MAPPINGS:
            return
        start, end, permissions, offset, device, inode, path = found.groups()
        yield Mapping(
            int(start, 16),
            int(end, 16),
            permissions.decode("ascii", "replace"),
            int(offset, 16),
            (device, int(inode)) if inode != b"0" else None,
            path.decode("utf-8", "replace"),
        )


def _maps_text(path: Path) -> bytes:
    """A process with torch in it has thousands of mappings: more than procfs.read_bytes takes."""
    try:
        with path.open("rb") as file:
            return file.read(16 << 20)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessGone(str(path)) from error


class Memory:
    """Raises PermissionError or ProcessGone where it may not, or cannot, be opened."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        path = proc / str(pid) / "mem"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise ProcessGone(str(path)) from error

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read(self, address: int, size_bytes: int) -> bytes:
        """All of it, or MemoryGone."""
        if not 0 <= size_bytes <= MAX_READ_BYTES or not 0 <= address < 1 << 63:
            raise MemoryGone(f"{size_bytes} bytes at {address:#x} are out of bounds")
        try:
            data = os.pread(self._fd, size_bytes, address)
        except OSError as error:
            raise MemoryGone(f"nothing to be read at {address:#x}") from error
        if len(data) != size_bytes:
            raise MemoryGone(f"nothing to be read at {address:#x}")
        return data

    def word(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little")

    def write(self, address: int, data: bytes) -> None:
        """All of it, or MemoryGone. The kernel gives a private copy of pages that come from a
        file, and lets whoever traces a process write where the process itself may not."""
        try:
            written = os.pwrite(self._fd, data, address)
        except OSError as error:
            raise MemoryGone(f"cannot write at {address:#x}: {error.strerror}") from error
        if written != len(data):
            raise MemoryGone(f"cannot write at {address:#x}")

    def close(self) -> None:
        os.close(self._fd)


def in_status(pid: int, field: str, proc: Path = PROC) -> str | None:
    """A line of /proc/PID/status. Raises ProcessGone, or PermissionError."""
    text = read_bytes(proc / str(pid) / "status").decode("utf-8", "replace")
    found = re.search(rf"^{re.escape(field)}:\s*(.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else None
