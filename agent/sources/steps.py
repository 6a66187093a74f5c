"""Reads every step ring of the target's processes: steps, ranks' steps, requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from dsagent.agent import procfs
from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import (
    Event,
    Readings,
    SourceState,
    SourceStatus,
    Target,
)
from dsagent.instrumentation.layout import Role
from dsagent.instrumentation.records import RankStep, RequestOpen, RequestRecord, Step
from dsagent.instrumentation.ring import (
    RingCandidate,
    RingReader,
    RingRejected,
    find_rings,
    step_word_address,
)

DISCOVER_NS = 1_000_000_000
MAX_RINGS = 256
MAX_RECORDS_A_POLL = 20_000  # a poll's work is bounded; what is left waits in the ring
PACE_STEPS = 2048  # recent steps that say how long one usually takes


class StepsSource:
    """All rings of the target's processes, looked for again every second: workers come and go.

    A ring whose process has ended is read to its end first. Losses are summed over all rings,
    those gone included. `pids` are the target's processes as last seen.
    """

    name = "steps"

    def __init__(self, target: Target) -> None:
        self._target = target
        self._rings: dict[int, RingReader] = {}  # by inode
        self._refused: dict[int, str] = {}
        self._new_schedulers: list[int] = []
        self._gone = [0, 0]  # dropped records and uncounted losses of rings closed since
        self._tree = procfs.ProcessTree()
        self._next_discovery_ns = 0
        self._cost_ns = 0
        self._lapped_last_poll = False
        self._pace = deque[int](maxlen=PACE_STEPS)
        self._open: dict[int, int] = {}  # key of each open request, and when it was received
        self.last_step_end_ns: int | None = None
        self.pids: tuple[int, ...] = (target.pid, *target.children)

    def start(self) -> None:
        self._discover(time.monotonic_ns())
        if not self._rings:
            reason = next(iter(self._refused.values()), "the target has no step ring")
            raise SourceUnavailable(reason)

    def poll(self, now_ns: int) -> Readings:
        started_ns = time.thread_time_ns()
        readings = Readings()
        if now_ns >= self._next_discovery_ns:
            readings.events.extend(self._discover(now_ns))
        self._lapped_last_poll = False
        for reader in self._rings.values():
            lapped_before = reader.counters.lapped
            for record in reader.read(max_records=MAX_RECORDS_A_POLL):
                self._sort(record, readings)
            self._lapped_last_poll |= reader.counters.lapped > lapped_before
        if readings.steps and not self._sees(Role.FRONTEND):
            # Steps serve requests: the front end has made its ring since we last looked.
            self.look_again()
        self._cost_ns += time.thread_time_ns() - started_ns
        return readings

    def look_again(self) -> None:
        """Look for new rings at the next poll, without waiting for the second to be over."""
        self._next_discovery_ns = 0

    def _sees(self, role: Role) -> bool:
        return any(reader.header.role is role for reader in self._rings.values())

    def _sort(
        self, record: Step | RankStep | RequestOpen | RequestRecord, readings: Readings
    ) -> None:
        match record:
            case Step():
                readings.steps.append(record)
                self._pace.append(record.end_ns - record.start_ns)
                self.last_step_end_ns = max(self.last_step_end_ns or 0, record.end_ns)
            case RankStep():
                readings.rank_steps.append(record)
            case RequestOpen():
                readings.opened.append(record)
                self._open[record.request_key] = record.received_ns
            case RequestRecord():
                readings.closed.append(record)
                self._open.pop(record.request_key, None)

    def _discover(self, now_ns: int) -> list[Event]:
        """Open what rings have come, close those whose process is gone and which are read."""
        self._next_discovery_ns = now_ns + DISCOVER_NS
        events: list[Event] = []
        pids = (
            self._target.pid,
            *procfs.descendants(self._target.pid, self._tree.parents()),
        )
        for pid in sorted(set(pids) - set(self.pids)):
            events.append(Event("child.started", now_ns, f"process {pid} has joined the target"))
        for pid in sorted(set(self.pids) - set(pids)):
            events.append(Event("child.ended", now_ns, f"process {pid} has left the target"))
        self.pids = pids
        there: set[int] = set()
        for pid in pids:
            for candidate in _rings_of(pid):
                there.add(candidate.inode)
                if candidate.inode not in self._rings and candidate.inode not in self._refused:
                    self._open_ring(candidate)
        for inode in set(self._rings) - there:
            reader = self._rings[inode]
            if reader.header.pid not in pids and not reader.counters.pending:
                del self._rings[inode]
                self._gone[0] += _dropped(reader)
                self._gone[1] += reader.counters.uncounted_loss
                reader.close()
        return events

    def _open_ring(self, candidate: RingCandidate) -> None:
        if len(self._rings) >= MAX_RINGS:
            self._refused[candidate.inode] = f"more than {MAX_RINGS} rings"
            return
        try:
            reader = RingReader.open(candidate)
        except RingRejected as rejection:
            self._refused[candidate.inode] = procfs.escape(str(rejection))
            return
        self._rings[candidate.inode] = reader
        if reader.header.role is Role.SCHEDULER:
            self._new_schedulers.append(candidate.inode)

    def new_step_words(self) -> dict[int, int]:
        """pid → address, in that process, of the word that holds its running step; of the
        schedulers found since the last call."""
        words = {}
        for inode in self._new_schedulers:
            pid = self._rings[inode].header.pid if inode in self._rings else None
            address = None if pid is None else step_word_address(pid, inode)
            if pid is not None and address is not None:
                words[pid] = address
        self._new_schedulers.clear()
        return words

    def running(self) -> Sequence[tuple[int, int, int, int]]:
        """(pid, step_id, start_ns, heartbeat_ns) of each scheduler that is in a step now."""
        found = []
        for reader in self._rings.values():
            if reader.header.role is Role.SCHEDULER:
                step_id, start_ns, heartbeat_ns = reader.running()
                if step_id:
                    found.append((reader.header.pid, step_id, start_ns, heartbeat_ns))
        return found

    def step_p99_ns(self) -> int | None:
        """The 99th percentile of the recent steps' time; None before the first step."""
        if not self._pace:
            return None
        ordered = sorted(self._pace)
        return ordered[(len(ordered) - 1) * 99 // 100]

    def oldest_open_ns(self) -> int | None:
        """When the oldest request arrived that is still open; None where there is none."""
        return min(self._open.values(), default=None)

    @property
    def uncounted_losses(self) -> int:
        return self._gone[1] + sum(ring.counters.uncounted_loss for ring in self._rings.values())

    def status(self) -> SourceStatus:
        dropped = self._gone[0] + sum(map(_dropped, self._rings.values()))
        reason = "; ".join(f"a ring is refused: {why}" for why in self._refused.values())
        state: SourceState = "ok"
        if not self._rings:
            state, reason = "unavailable", reason or "the target has no step ring"
        elif self._lapped_last_poll:
            state, reason = "lagging", "records were overwritten before they were read"
        elif any(ring.health().switched_off for ring in self._rings.values()):
            state, reason = "failed", "a writer switched itself off after repeated failures"
        return SourceStatus(self.name, state, reason, dropped, cost_ns=self._cost_ns)

    def stop(self) -> None:
        for inode in tuple(self._rings):
            reader = self._rings.pop(inode)
            self._gone[0] += _dropped(reader)
            self._gone[1] += reader.counters.uncounted_loss
            reader.close()


def _dropped(reader: RingReader) -> int:
    counters = reader.counters
    return counters.lapped + counters.torn + counters.rejected


def _rings_of(pid: int) -> list[RingCandidate]:
    try:
        return find_rings(pid)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []  # it has ended, or is not ours: the rings of the others count
