"""Opens a file that another process has mapped, without following what that process may have put
in its way."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.host.procfs import PROC

_OPENAT2 = 437  # include/uapi/asm-generic/unistd.h, the same number everywhere
# include/uapi/linux/openat2.h
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_OPEN_HOW = struct.Struct("=QQQ")  # flags, mode, resolve

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Mapped:
    """`range`, `inode` and `path` as the process's maps tell them; the path is the process's own
    word, in its own mount namespace."""

    pid: int
    range: str
    inode: int
    path: str

    def open(self, proc: Path = PROC) -> int:
        """A descriptor to read it by. Raises OSError.

        Through map_files it is this very file, whatever its path says; but that link wants
        CAP_CHECKPOINT_RESTORE, which a container's agent does without. Then its path is walked
        inside the process's own root, out of which no link leads, and taken only where a regular
        file of the same inode is found: opened for reading only after that, since to open a device
        may do something.
        """
        folder = proc / str(self.pid)
        try:
            fd = os.open(folder / "map_files" / self.range, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            return self._open_in_root(folder)
        try:
            self._regular(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextmanager
    def path_of_it(self) -> Iterator[str]:
        """A path that leads to this very file, as long as the context lasts. Raises OSError."""
        fd = self.open()
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def _open_in_root(self, folder: Path) -> int:
        root = os.open(folder / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            place = _walk(root, self.path)
        finally:
            os.close(root)
        try:
            if self._regular(place) != self.inode:
                raise FileNotFoundError(f"another file has its path now: {self.path!r}")
            return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(place)

    def _regular(self, fd: int) -> int:
        """The inode of a regular file."""
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(f"not a regular file: {self.path!r}")
        return found.st_ino


def _walk(root: int, path: str) -> int:
    how = _OPEN_HOW.pack(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    fd = _libc.syscall(
        ctypes.c_long(_OPENAT2),
        ctypes.c_int(root),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_char_p(how),
        ctypes.c_size_t(_OPEN_HOW.size),
    )
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return int(fd)
