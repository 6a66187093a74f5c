"""/proc, read carefully: what is there is another process's to change at any moment.

Every function takes the /proc folder, so that tests can read frozen ones.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
MAX_FILE_BYTES = 1 << 20  # no file read here is honestly larger
CLOCK_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_CONTAINER_ID = re.compile(r"(?:^|[/-])([0-9a-f]{64})(?:\.scope)?$", re.MULTILINE)


class ProcessGone(Exception):  # noqa: N818 - what happened, not what went wrong
    """The process ended, or never was."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """/proc/PID/stat, or /proc/PID/task/TID/stat, as far as it is used here."""

    pid: int
    comm: str  # control characters escaped
    state: str
    ppid: int
    minor_faults: int
    major_faults: int
    user_ns: int
    system_ns: int
    threads: int
    start_ticks: int
    rss_bytes: int


def escape(text: str, limit: int = 256) -> str:
    """Text of a stranger, safe on a terminal: control characters escaped, at most `limit` long."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def read_bytes(path: Path, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The file, at most 1 MiB of it, or so much. Raises ProcessGone, or PermissionError."""
    try:
        with path.open("rb", buffering=0) as file:
            chunks = []
            left = most_bytes
            while left > 0 and (chunk := file.read(min(left, 65536))):
                chunks.append(chunk)
                left -= len(chunk)
            return b"".join(chunks)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessGone(str(path)) from error


def list_names(path: Path) -> list[str]:
    """What is in a folder below /proc/PID. Raises ProcessGone, or PermissionError."""
    try:
        return os.listdir(path)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessGone(str(path)) from error


def parse_stat(line: bytes) -> ProcessStat:
    """The command's name may hold spaces and parentheses: the last one ends it."""
    head, _, tail = line.rpartition(b")")
    pid, _, comm = head.partition(b"(")
    fields = tail.split()
    if len(fields) < 22:
        raise ProcessGone("truncated stat")
    try:
        return _stat_of(int(pid), comm, fields)
    except ValueError as error:  # not the kernel's own: some sandboxes make up their /proc
        raise ProcessGone("a stat that makes no sense") from error


def _stat_of(pid: int, comm: bytes, fields: list[bytes]) -> ProcessStat:
    return ProcessStat(
        pid=pid,
        comm=escape(comm.decode("utf-8", "replace")),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        user_ns=int(fields[11]) * CLOCK_TICK_NS,
        system_ns=int(fields[12]) * CLOCK_TICK_NS,
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
    )


def read_stat(pid: int, proc: Path = PROC) -> ProcessStat:
    """Raises ProcessGone, or PermissionError (hidepid)."""
    return parse_stat(read_bytes(proc / str(pid) / "stat"))


def process_of(pid: int, proc: Path = PROC) -> int:
    """The process that a thread belongs to: /proc/TID is there for threads too, but holds no
    place among the processes. What cannot be read is taken for a process."""
    try:
        status = read_bytes(proc / str(pid) / "status")
    except (ProcessGone, PermissionError):
        return pid
    found = re.search(rb"^Tgid:\s+([0-9]+)$", status, re.MULTILINE)
    return int(found.group(1)) if found else pid


def parents(proc: Path = PROC) -> dict[int, int]:
    """pid → parent's pid, of every process there is now and that may be seen."""
    return _parents_of(_pids(proc), proc)


def _pids(proc: Path) -> set[int]:
    return {int(name) for name in os.listdir(proc) if name.isdigit()}


def _parents_of(pids: Iterable[int], proc: Path) -> dict[int, int]:
    found = {}
    for pid in pids:
        try:
            found[pid] = read_stat(pid, proc).ppid
        except (ProcessGone, PermissionError):
            continue
    return found


class ProcessTree:
    """`parents`, kept up to date cheaply: only new pids are read, all of them every tenth time
    (a pid may have been reused, an orphan adopted)."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._parent_of: dict[int, int] = {}
        self._asked = 0

    def parents(self) -> dict[int, int]:
        if self._asked % 10 == 0:
            self._parent_of = parents(self._proc)
        else:
            there = _pids(self._proc)
            for pid in self._parent_of.keys() - there:
                del self._parent_of[pid]
            self._parent_of |= _parents_of(there - self._parent_of.keys(), self._proc)
        self._asked += 1
        return self._parent_of


def descendants(pid: int, parent_of: dict[int, int]) -> tuple[int, ...]:
    """All processes below `pid`, nearest first, itself not among them."""
    return below(pid, children(parent_of))


def children(parent_of: dict[int, int]) -> dict[int, list[int]]:
    """The other way around, for who asks of many processes."""
    found: dict[int, list[int]] = {}
    for child, parent in parent_of.items():
        found.setdefault(parent, []).append(child)
    return found


def below(pid: int, children_of: dict[int, list[int]], most: int = sys.maxsize) -> tuple[int, ...]:
    """As `descendants`, or so many of them. A pid that was given to another while they were read
    may make a circle."""
    seen = {pid}
    found: list[int] = []
    level = [pid]
    while level and len(found) < most:
        level = sorted({child for parent in level for child in children_of.get(parent, ())} - seen)
        seen.update(level)
        found.extend(level)
    return tuple(found[:most])


def ancestors(pid: int, parent_of: dict[int, int]) -> tuple[int, ...]:
    """The parent first, the oldest last."""
    found: dict[int, None] = {}
    while (pid := parent_of.get(pid, 0)) > 0 and pid not in found:
        found[pid] = None
    return tuple(found)


def container_id(pid: int, proc: Path = PROC) -> str | None:
    """The 64 hex digits that container runtimes put into the cgroup's path; None without."""
    try:
        text = read_bytes(proc / str(pid) / "cgroup").decode("utf-8", "replace")
    except (ProcessGone, PermissionError):
        return None
    found = _CONTAINER_ID.search(text)
    return found.group(1) if found else None


def pss_bytes(pid: int, proc: Path = PROC) -> int | None:
    """Proportional set size: resident memory, shared pages divided by those who share them."""
    try:
        text = read_bytes(proc / str(pid) / "smaps_rollup")
    except (ProcessGone, PermissionError):
        return None
    found = re.search(rb"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def own_pss_bytes() -> int | None:
    """Of this process and its helpers: the processes below it that share its process group. What
    it started for the user (an engine, a load) has a group of its own."""
    own = os.getpid()
    total = pss_bytes(own)
    if total is None:
        return None
    for pid in descendants(own, parents()):
        try:
            if os.getpgid(pid) == os.getpgrp():
                total += pss_bytes(pid) or 0
        except ProcessLookupError:
            continue
    return total


def context_switches(pid: int, tid: int, proc: Path = PROC) -> tuple[int, int]:
    """(voluntary, involuntary) of one thread. Raises ProcessGone, or PermissionError."""
    text = read_bytes(proc / str(pid) / "task" / str(tid) / "status")
    found = re.search(
        rb"^voluntary_ctxt_switches:\s+(\d+)\nnonvoluntary_ctxt_switches:\s+(\d+)",
        text,
        re.MULTILINE,
    )
    if found is None:
        raise ProcessGone("truncated status")
    return int(found.group(1)), int(found.group(2))


def threads(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """None of a process that has ended. Raises PermissionError."""
    try:
        return tuple(int(name) for name in list_names(proc / str(pid) / "task"))
    except ProcessGone:
        return ()


def command_line(pid: int, proc: Path = PROC, most_bytes: int = MAX_FILE_BYTES) -> tuple[str, ...]:
    """Its arguments as it was started with them; empty where they cannot be read."""
    try:
        text = read_bytes(proc / str(pid) / "cmdline", most_bytes).decode("utf-8", "replace")
    except (ProcessGone, PermissionError):
        return ()
    return tuple(text.removesuffix("\0").split("\0"))


def age_s(start_ticks: int) -> float:
    """How long ago a process began whose stat says so."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks * CLOCK_TICK_NS / 1e9
