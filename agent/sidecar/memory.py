"""How much memory the sidecar may use, how much it does, and what it gives up before the kernel
would end it.

Two limits: `--max-memory` on its own resident set, and that of its container's memory cgroup,
version 1 or 2. A cgroup that holds other people's processes too is no container of ours, and its
limit is left alone.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import PROC
from dsagent.agent.session.ledger import MAX_BYTES
from dsagent.agent.sidecar.backoff import SECOND_NS

CGROUPS = Path("/sys/fs/cgroup")
NO_LIMIT_BYTES = 1 << 50  # what version 1 writes for none is larger
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGE_BYTES = 512 << 10
CALM_NS = 60 * SECOND_NS  # below the threshold for so long before anything is taken up again
CALM_RATIO = 0.1  # and so far below it


@dataclass(frozen=True, slots=True)
class Usage:
    """`limit_from`: --max-memory or cgroup."""

    used_bytes: int
    limit_bytes: int
    limit_from: str

    @property
    def ratio(self) -> float:
        return self.used_bytes / self.limit_bytes


@dataclass(frozen=True, slots=True)
class Relief:
    """What is done from `ratio` of the limit on."""

    ratio: float
    ledger_bytes: int
    kernel: bool
    what: str


RELIEFS = (
    Relief(0.0, MAX_BYTES, True, "all is kept"),
    Relief(0.75, 8 << 20, True, "recent accounts take 8 MiB at most"),
    Relief(0.85, 2 << 20, True, "recent accounts take 2 MiB at most"),
    Relief(0.92, 256 << 10, False, "hardly any recent account is kept, the kernel source is off"),
)


class Pressure:
    """Which relief holds. Rises at once, falls one at a time after a calm minute. Pure."""

    def __init__(self) -> None:
        self.level = 0
        self._calm_since_ns: int | None = None

    @property
    def relief(self) -> Relief:
        return RELIEFS[self.level]

    def judge(self, ratio: float, now_ns: int) -> bool:
        """Whether another relief holds from now on."""
        reached = max(i for i, relief in enumerate(RELIEFS) if ratio >= relief.ratio)
        before = self.level
        if reached >= self.level or ratio > self.relief.ratio - CALM_RATIO:
            self._calm_since_ns = None
            self.level = max(reached, self.level)
        elif self._calm_since_ns is None:
            self._calm_since_ns = now_ns
        elif now_ns - self._calm_since_ns >= CALM_NS:
            self._calm_since_ns = None
            self.level -= 1
        return self.level != before


def take_little() -> None:
    """At the start of the process, before its threads: what it frees in large pieces goes back to
    the kernel at once. glibc would raise both thresholds with the largest piece it has seen freed,
    and keep twice that at the top of each thread's arena."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:  # another C library has its own ways
        set_option(M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(M_TRIM_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """What is free in this process, to the kernel. Attaching takes tens of MiB for a moment, from
    the arena of the thread that does it, and glibc keeps them."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # another C library has its own ways
        trim(0)


class Tidier:
    """Gives back what comings and goings of engines leave behind: once they are over."""

    def __init__(self, give_back: Callable[[], None] = give_back) -> None:
        self._give_back = give_back
        self._moves = 0

    def look(self, moves: int, *, is_quiet: bool) -> None:
        """`moves`: how many there have been; `is_quiet`: none is under way."""
        if is_quiet and moves != self._moves:
            self._moves = moves
            self._give_back()


def usage(
    max_bytes: int | None,
    *,
    proc: Path = PROC,
    cgroups: Path = CGROUPS,
    is_ours: Callable[[set[int]], bool] | None = None,
) -> Usage | None:
    """Of the limit that is nearer; None where there is none."""
    found = []
    if max_bytes is not None:
        found.append(Usage(_resident_bytes(proc), max_bytes, "--max-memory"))
    if (of_cgroup := _of_cgroup(proc, cgroups, is_ours or _only_ours)) is not None:
        found.append(of_cgroup)
    return max(found, key=lambda each: each.ratio, default=None)


def _resident_bytes(proc: Path) -> int:
    fields = procfs.read_bytes(proc / "self" / "statm").split()
    return int(fields[1]) * procfs.PAGE_BYTES


def _only_ours(pids: set[int]) -> bool:
    own = os.getpid()
    return pids <= {own, *procfs.descendants(own, procfs.parents())}


def _of_cgroup(proc: Path, cgroups: Path, is_ours: Callable[[set[int]], bool]) -> Usage | None:
    for folder, limit, used in _folders(proc, cgroups):
        limit_bytes = _number(folder / limit)
        used_bytes = _number(folder / used)
        if limit_bytes is None or used_bytes is None:
            continue
        if not 0 < limit_bytes < NO_LIMIT_BYTES or not is_ours(_numbers(folder / "cgroup.procs")):
            return None
        return Usage(max(0, used_bytes - _given_back(folder)), limit_bytes, "cgroup")
    return None


def _folders(proc: Path, cgroups: Path) -> list[tuple[Path, str, str]]:
    """Where the memory controller may be seen, with its files' names. In a container its own
    cgroup is the root of what is mounted there."""
    try:
        lines = procfs.read_bytes(proc / "self" / "cgroup").decode("utf-8", "replace").splitlines()
    except (procfs.ProcessGone, PermissionError):
        lines = []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        within = path.strip("/")
        if ".." in within.split("/"):
            within = ""
        if "memory" in controllers.split(","):
            base, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            base, names = cgroups, ("memory.max", "memory.current")
        else:
            continue
        found += [(base / within, *names), (base, *names)]
    return found


def _number(path: Path) -> int | None:
    numbers = _numbers(path)
    return next(iter(numbers)) if len(numbers) == 1 else None


def _numbers(path: Path) -> set[int]:
    try:
        words = procfs.read_bytes(path).split()
    except (procfs.ProcessGone, OSError):
        return set()
    return {int(word) for word in words if word.isdigit()}


def _given_back(folder: Path) -> int:
    """Pages of files that the kernel takes back before it ends anybody."""
    try:
        lines = procfs.read_bytes(folder / "memory.stat").splitlines()
    except (procfs.ProcessGone, OSError):
        return 0
    values = dict(line.split(None, 1) for line in lines if len(line.split()) == 2)
    text = values.get(b"total_inactive_file", values.get(b"inactive_file", b"0"))
    return int(text) if text.isdigit() else 0
