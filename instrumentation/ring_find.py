"""Finding another process's rings, and opening one without trusting anything about it.

A descriptor is first had in a way that has no effect on what it names
(ring_descriptors.py); only when that proves to be a memory file of the right
name and owner is it opened for reading, and only a sealed one of a sane size may
be mapped: one that could still be truncated would kill the reader by SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dsagent.instrumentation import layout, ring_descriptors
from dsagent.instrumentation.layout import RING_LINK, Role

_MAX_RINGS = 256
_MAX_MAPPINGS = 1 << 17
_MAX_THREADS = 1 << 14
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RingRejected(Exception):  # noqa: N818  says what became of the ring
    """This is no ring to be read; the text is the reason, for people."""


@dataclass(frozen=True, slots=True)
class RingCandidate:
    """What looks like a ring among a process's descriptors; nothing is checked but its name."""

    pid: int
    fd: int
    inode: int


@dataclass(frozen=True, slots=True)
class RingHeader:
    """The part of the header that never changes. pid and tid are as this process sees them."""

    version: int
    role: Role
    engine_id: int
    pid: int
    tid: int
    capacity_bytes: int
    exports_spans: bool
    vllm: bool  # whose process it is: vLLM's, or the bundled engine's
    created_ns: int


def find_rings(pid: int) -> list[RingCandidate]:
    """The rings among a process's descriptors, each once.

    Raises ProcessLookupError or FileNotFoundError where the process is gone, PermissionError
    where its descriptors may not be seen.
    """
    found: dict[int, RingCandidate] = {}
    for fd, inode in ring_descriptors.named(pid, RING_LINK):
        found.setdefault(inode, RingCandidate(pid, fd, inode))
        if len(found) >= _MAX_RINGS:
            break
    return sorted(found.values(), key=lambda candidate: candidate.fd)


@contextmanager
def _opened(candidate: RingCandidate) -> Iterator[int]:
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(ring_descriptors.opened(candidate.pid, candidate.fd))
        except OSError as error:
            raise RingRejected(f"cannot open it: {error.strerror}") from error
        yield fd


@contextmanager
def _readable(opened: int) -> Iterator[int]:
    try:
        fd = os.open(f"/proc/self/fd/{opened}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RingRejected(f"cannot open it: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _memory_file_device() -> int:
    """The device number of anonymous memory files: all of them live on one kernel mount."""
    fd = os.memfd_create("dsagent.probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _status_numbers(path: str, field: str) -> list[int]:
    """The numbers after `field:` in a status file of /proc; none where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as status:
            for line in status:
                if line.startswith(field + ":"):
                    return [int(word) for word in line.split()[1:] if word.isdigit()]
    except OSError:
        return []
    return []


def map_ring(candidate: RingCandidate) -> mmap.mmap:
    """A read-only map of the candidate's file, every check passed but those of its contents."""
    with _opened(candidate) as probe:
        seen = os.fstat(probe)
        if not stat.S_ISREG(seen.st_mode) or seen.st_dev != _memory_file_device():
            raise RingRejected("it is not a memory file")
        if os.readlink(f"/proc/self/fd/{probe}") != RING_LINK:
            raise RingRejected(f"it is not named {layout.RING_NAME}")
        if seen.st_ino != candidate.inode:
            raise RingRejected("the descriptor names another file by now")
        if seen.st_uid not in _status_numbers(f"/proc/{candidate.pid}/status", "Uid"):
            raise RingRejected("it belongs to another user than the process")
        with _readable(probe) as fd:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise RingRejected("it is not sealed against shrinking and growing")
            size = os.fstat(fd).st_size  # sealed: it stays
            data_bytes = size - layout.HEADER_BYTES
            if not layout.MIN_CAPACITY_BYTES <= data_bytes <= layout.MAX_CAPACITY_BYTES:
                raise RingRejected(f"its size is {size} bytes")
            return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def read_header(words: memoryview, candidate: RingCandidate, data_bytes: int) -> RingHeader:
    """The fixed header of a mapped ring, checked. Raises RingRejected."""
    magic, version, role, engine_id, pid, tid, capacity, flags, created_ns = (
        layout.HEADER.unpack_from(words)
    )
    if magic != layout.MAGIC:
        raise RingRejected("its header is not a ring's")
    if version != layout.VERSION:
        raise RingRejected(f"it has version {version}; this agent reads version {layout.VERSION}")
    if capacity != data_bytes or capacity & (capacity - 1):
        raise RingRejected(f"its header claims a capacity of {capacity} bytes, it has {data_bytes}")
    if role not in set(Role):
        raise RingRejected(f"its role is {role}")
    return RingHeader(
        version=version,
        role=Role(role),
        engine_id=engine_id,
        pid=_own_pid(candidate.pid, pid),
        tid=_outer_tid(candidate.pid, tid),
        capacity_bytes=capacity,
        exports_spans=bool(flags & layout.FLAG_EXPORTS_SPANS),
        vllm=bool(flags & layout.FLAG_VLLM),
        created_ns=created_ns,
    )


def _own_pid(pid: int, inner: int) -> int:
    """`pid`, once the header's own idea of it agrees: a child between fork and exec still holds
    its parent's rings. In a container the two differ, and NSpid says how."""
    if inner != pid and _status_numbers(f"/proc/{pid}/status", "NSpid")[-1:] != [inner]:
        raise RingRejected(f"it was made by another process ({inner})")
    return pid


def _outer_tid(pid: int, inner: int) -> int:
    """The thread's id as this process sees it; the header's own where the thread is gone."""
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")[:_MAX_THREADS]]
    except OSError:
        return inner
    if _status_numbers(f"/proc/{pid}/status", "NSpid")[-1:] == [pid]:
        return inner  # one namespace: the ids are the same
    for tid in threads:
        if _status_numbers(f"/proc/{pid}/task/{tid}/status", "NSpid")[-1:] == [inner]:
            return tid
    return inner


def step_word_address(pid: int, inode: int) -> int | None:
    """Where, in that process, the word lies that holds its running step; None if not mapped."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            for count, line in enumerate(maps):
                if count >= _MAX_MAPPINGS:
                    break
                # address perms offset device inode path
                fields = line.rstrip("\n").split(maxsplit=5)
                if (
                    len(fields) == 6
                    and fields[5] == RING_LINK
                    and fields[4] == str(inode)
                    and int(fields[2], 16) == 0
                ):
                    return int(fields[0].split("-")[0], 16) + layout.RUNNING_STEP_AT
    except OSError:
        return None
    return None
