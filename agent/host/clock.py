"""The wall clock, tied to the monotonic one with an error bound that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dsagent.agent.errors import CANNOT_ATTACH, DsagentError
from dsagent.agent.facts import ClockAnchor
from dsagent.agent.host.procfs import PROC, ProcessGone, read_bytes

RENEW_NS = 10_000_000_000


def read_anchor(
    rounds: int = 8,
    mono: Callable[[], int] = time.monotonic_ns,
    unix: Callable[[], int] = time.time_ns,
) -> ClockAnchor:
    """Reads the wall clock between two readings of the monotonic one, `rounds` times, and keeps
    the tightest bracket: the wall clock was read within it, so half of it bounds the error."""
    best: ClockAnchor | None = None
    for _ in range(rounds):
        before_ns = mono()
        unix_ns = unix()
        after_ns = mono()
        error_ns = (after_ns - before_ns + 1) // 2
        if best is None or error_ns < best.error_ns:
            best = ClockAnchor((before_ns + after_ns) // 2, unix_ns, error_ns)
    assert best is not None
    return best


class Clock:
    """Keeps a fresh anchor. `error_ns` is the worst bound so far: the bracket, plus what the wall
    clock had moved against the monotonic one since the anchor before (slewed, stepped)."""

    def __init__(self, read: Callable[[], ClockAnchor] = read_anchor) -> None:
        self._read = read
        self._anchor = read()
        self.error_ns = self._anchor.error_ns

    def anchor(self, now_ns: int) -> ClockAnchor:
        """The anchor to use at `now_ns` (monotonic); at most 10 s old."""
        if now_ns - self._anchor.mono_ns >= RENEW_NS:
            fresh = self._read()
            drift_ns = abs(fresh.unix_ns - self._anchor.unix(fresh.mono_ns))
            self.error_ns = max(self.error_ns, fresh.error_ns + drift_ns)
            self._anchor = fresh
        return self._anchor


def check_time_namespace(pid: int, proc: Path = PROC) -> None:
    """Raises where the target's monotonic clock is shifted against ours: its times would be
    taken for ours, and every account would be wrong without looking so."""
    theirs = _monotonic_offset(proc / str(pid) / "timens_offsets")
    ours = _monotonic_offset(proc / "self" / "timens_offsets")
    if theirs != ours:
        raise DsagentError(
            f"process {pid} runs in a time namespace whose monotonic clock differs from ours; "
            "run dsagent inside it (nsenter --time)",
            exit_code=CANNOT_ATTACH,
        )


def _monotonic_offset(path: Path) -> tuple[bytes, ...]:
    try:
        lines = read_bytes(path).splitlines()
    except (ProcessGone, PermissionError):
        return (b"0", b"0")  # a kernel without time namespaces has no shifted clocks
    for line in lines:
        name, *offset = line.split()
        if name in (b"monotonic", b"1"):
            return tuple(offset)
    return (b"0", b"0")
