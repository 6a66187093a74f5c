"""Another process's descriptors of memory files, with no more rights than needed.

/proc/PID/fd may be entered by the process's own user only, and uid 0 without
CAP_DAC_READ_SEARCH, as containers have it, is another user there. But who may
trace the process may list /proc/PID/fdinfo (Linux 5.14), and take a descriptor
by pidfd_getfd. Only those on the mount of memory files are taken: closing any
other could mean something to its driver.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

MAX_DESCRIPTORS = 1 << 16
_MAX_INFO_BYTES = 4096
_MOUNT = re.compile(rb"^mnt_id:\s*(\d+)$", re.MULTILINE)
_PIDFD_GETFD = 438  # alike on every architecture


def named(pid: int, link: str) -> Iterator[tuple[int, int]]:
    """(descriptor, inode) of each memory file of the process whose link under /proc says `link`.

    Raises ProcessLookupError or FileNotFoundError where the process is gone, PermissionError
    where its descriptors may not be seen.
    """
    try:
        entries = os.scandir(f"/proc/{pid}/fd")
    except PermissionError:
        yield from _named_by_taking(pid, link)
        return
    with entries:
        for count, entry in enumerate(entries):
            if count >= MAX_DESCRIPTORS:
                return
            try:
                if os.readlink(entry.path) == link:
                    yield int(entry.name), os.stat(entry.path).st_ino
            except FileNotFoundError:  # closed meanwhile
                continue


def _named_by_taking(pid: int, link: str) -> Iterator[tuple[int, int]]:
    mount = _mount_of_memory_files()
    for name in os.listdir(f"/proc/{pid}/fdinfo")[:MAX_DESCRIPTORS]:
        try:
            if _mount(pid, int(name)) != mount:
                continue
            with _taken(pid, int(name)) as ours:
                if os.readlink(f"/proc/self/fd/{ours}") == link:
                    yield int(name), os.fstat(ours).st_ino
        except FileNotFoundError:  # closed meanwhile
            continue


@contextmanager
def opened(pid: int, fd: int) -> Iterator[int]:
    """A descriptor of our own for what `fd` is there: opened O_PATH, which has no effect on what
    it names, or, of a memory file, taken. To be read, it is opened again through
    /proc/self/fd. Raises OSError."""
    try:
        ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    except PermissionError:
        if _mount(pid, fd) != _mount_of_memory_files():
            raise
        with _taken(pid, fd) as ours:
            yield ours
        return
    try:
        yield ours
    finally:
        os.close(ours)


@contextmanager
def _taken(pid: int, fd: int) -> Iterator[int]:
    """pidfd_getfd, which Python has no name for. Raises OSError: FileNotFoundError where nothing
    is open there, PermissionError where a filter of system calls forbids it, too."""
    process = os.pidfd_open(pid)
    try:
        ours = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, fd, 0)
        if ours < 0:
            code = ctypes.get_errno()
            code = {errno.EBADF: errno.ENOENT, errno.ENOSYS: errno.EPERM}.get(code, code)
            raise OSError(code, os.strerror(code))
    finally:
        os.close(process)
    try:
        yield ours
    finally:
        os.close(ours)


def _mount(pid: int | str, fd: int) -> int | None:
    """The id of the mount that a descriptor's file lies on. Raises OSError."""
    with open(f"/proc/{pid}/fdinfo/{fd}", "rb", buffering=0) as info:
        found = _MOUNT.search(info.read(_MAX_INFO_BYTES) or b"")
    return int(found.group(1)) if found else None


def _mount_of_memory_files() -> int | None:
    """All of them live on one mount of the kernel's own."""
    fd = os.memfd_create("dsagent.probe", os.MFD_CLOEXEC)
    try:
        return _mount("self", fd)
    finally:
        os.close(fd)
