"""Reads every step ring of the target's processes: steps, ranks' steps, requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from dsagent.agent.attribution.attribute import STALL_NS
from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import (
    Event,
    Readings,
    SourceState,
    SourceStatus,
    Target,
)
from dsagent.agent.host import procfs
from dsagent.agent.sources.open_requests import OpenRequests
from dsagent.agent.sources.plausible import plausible
from dsagent.agent.sources.ring_set import RingSet, losses
from dsagent.instrumentation.layout import Role
from dsagent.instrumentation.records import RankStep, RequestOpen, RequestRecord, Step
from dsagent.instrumentation.ring import RingReader, step_word_address
from dsagent.instrumentation.tally import Tally
from dsagent.instrumentation.wire import Record

DISCOVER_NS = 1_000_000_000
MAX_RECORDS_A_POLL = 256  # of all rings: no poll holds up the loop; the rest waits in the rings
MOST_TALLIES = 4096  # read, and not taken yet
PACE_STEPS = 2048  # recent steps that say how long one usually takes


class StepsSource:
    """All rings of the target's processes, looked for again every second: workers come and go.

    Losses are summed over all rings, those gone included. `pids` are the target's processes as
    last seen. `behind`: the last poll has left something in a ring. Requests that ended before
    `attached_ns` were never ours: they are left out.
    """

    name = "steps"

    def __init__(self, target: Target) -> None:
        self._target = target
        self._rings = RingSet()
        self._new_workers: list[RingReader] = []
        self._scheduling: set[int] = set()  # pids of schedulers
        self._tree = procfs.ProcessTree()
        self._next_discovery_ns = 0
        self._cost_ns = 0
        self._lapped_last_poll = False
        self._pace = deque[int](maxlen=PACE_STEPS)
        self._open = OpenRequests()
        self._tallies = deque[Tally]()
        self._tallies_dropped = 0
        self._never_closed = 0  # requests whose end will not be read any more
        self._ends_lost_ns = 0  # until when ends of requests may have been lost
        self.behind = False
        self.attached_ns = time.monotonic_ns()
        self.last_step_end_ns: int | None = None
        self.pids: tuple[int, ...] = (target.pid, *target.children)

    def start(self) -> None:
        self._discover(time.monotonic_ns())
        if not self._rings.open:
            raise SourceUnavailable(self._rings.refusals() or "the target has no step ring")

    def poll(self, now_ns: int) -> Readings:
        started_ns = time.thread_time_ns()
        readings = Readings()
        if now_ns >= self._next_discovery_ns:
            readings.events.extend(self._discover(now_ns))
        self._lapped_last_poll = False
        self._read_all(readings, now_ns)
        for reader in self._rings.let_go(now_ns):
            if reader.header.role is Role.FRONTEND:
                self._ends_lost_ns = now_ns
        self._forget(readings, now_ns)
        if readings.steps and not self._sees(Role.FRONTEND):
            # Steps serve requests: the front end has made its ring since we last looked.
            self.look_again()
        self._cost_ns += time.thread_time_ns() - started_ns
        return readings

    def leave_unread(self) -> None:
        """After the last poll: what it has left counts as dropped."""
        self._rings.leave_unread()

    def look_again(self) -> None:
        """Look for new rings at the next poll, without waiting for the second to be over."""
        self._next_discovery_ns = 0

    def _sees(self, role: Role) -> bool:
        return any(reader.header.role is role for reader in self._rings.open.values())

    def _read_all(self, readings: Readings, now_ns: int) -> None:
        """An equal share of the poll's records for each ring, or what those before have left. The
        schedulers' first: what ranks and front ends wrote before an output is there when the step
        that made it is."""
        left = MAX_RECORDS_A_POLL
        rings = sorted(
            self._rings.open.items(), key=lambda item: item[1].header.role is not Role.SCHEDULER
        )
        for place, (inode, reader) in enumerate(rings):
            left -= self._read(reader, max(1, left // (len(rings) - place)), readings, now_ns)
            if reader.refused:
                self._rings.give_up(inode, reader.refused)
        self.behind = any(reader.counters.pending for reader in self._rings.open.values())

    def _read(self, reader: RingReader, max_records: int, readings: Readings, now_ns: int) -> int:
        """How many records it had."""
        lapped_before, lost_before = reader.counters.lapped, losses(reader)
        records = reader.read(max_records)
        counters = reader.counters
        clock_ns = time.monotonic_ns()
        for record in records:
            if plausible(record, clock_ns):
                self._sort(record, readings)
            else:
                counters.read -= 1
                counters.rejected += 1
        self._lapped_last_poll |= counters.lapped > lapped_before
        if reader.header.role is Role.FRONTEND and (reader.refused or losses(reader) > lost_before):
            self._ends_lost_ns = now_ns
        return len(records)

    def _sort(self, record: Record, readings: Readings) -> None:
        match record:
            case Step():
                readings.steps.append(record)
                self._pace.append(record.end_ns - record.start_ns)
                self.last_step_end_ns = max(self.last_step_end_ns or 0, record.end_ns)
            case RankStep():
                readings.rank_steps.append(record)
            case Tally():
                self._tallies.append(record)
                if len(self._tallies) > MOST_TALLIES:
                    self._tallies.popleft()
                    self._tallies_dropped += 1
            case RequestOpen():
                readings.opened.append(record)
                readings.forgotten += self._open.open(
                    record.request_key, record.received_ns, record.trace_id
                )
            case RequestRecord():
                self._open.close(record.request_key)
                if record.sent_ns >= self.attached_ns:
                    readings.closed.append(record)
                else:
                    readings.forgotten.append(record.request_key)

    def take_tallies(self) -> list[Tally]:
        """Those read since the last call, for the source that makes samples of them."""
        taken = list(self._tallies)
        self._tallies.clear()
        return taken

    def _forget(self, readings: Readings, now_ns: int) -> None:
        """A request whose end was lost would stay open for ever. Where no scheduler has any work,
        those that came before the last loss have most likely ended."""
        if self._ends_lost_ns and not self.running():
            before_ns = min(self._ends_lost_ns, now_ns - STALL_NS)
            forgotten = self._open.forget_before(before_ns)
            self._never_closed += len(forgotten)
            readings.forgotten += forgotten

    def _discover(self, now_ns: int) -> list[Event]:
        """Follows the target's processes, and looks for their rings."""
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
        self._scheduling.intersection_update(pids)
        for reader in self._rings.look(pids, now_ns):
            if reader.header.role is not Role.FRONTEND:
                self._new_workers.append(reader)
        return events

    def new_step_words(self) -> dict[int, int]:
        """pid → address, in that process, of the word that holds its running step; of the
        schedulers and ranks found since the last call. Where one process is both, the scheduler's:
        its step goes on for longer."""
        words = {}
        for reader in sorted(self._new_workers, key=lambda reader: reader.header.role):
            pid = reader.header.pid
            if reader.header.role is Role.SCHEDULER:
                self._scheduling.add(pid)
            elif pid in self._scheduling:
                continue
            address = step_word_address(pid, reader.inode)
            if address is not None:
                words[pid] = address
        self._new_workers.clear()
        return words

    def running(self) -> Sequence[tuple[int, int, int, int]]:
        """(pid, step_id, start_ns, heartbeat_ns) of each scheduler that is in a step now."""
        found = []
        for reader in self._rings.open.values():
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
        return self._open.oldest_ns()

    @property
    def unfinished(self) -> int:
        """Requests seen to begin and not to end: those that go on now, and those cut off."""
        return len(self._open) + self._never_closed + self._open.given_up

    @property
    def unfinished_trace_ids(self) -> list[int]:
        """Of those, but for some where more than a few were given up."""
        return [*self._open.dropped_trace_ids, *self._open.trace_ids]

    @property
    def uncounted_losses(self) -> int:
        return self._rings.uncounted_loss

    def status(self) -> SourceStatus:
        reasons = [self._rings.refusals()]
        if self._open.given_up:
            reasons.append(f"{self._open.given_up} open requests too many were given up")
        if self._tallies_dropped:
            reasons.append(f"{self._tallies_dropped} tallies too many were given up")
        reason = "; ".join(filter(None, reasons))
        state: SourceState = "ok"
        rings = self._rings.open.values()
        if not rings:
            state, reason = "unavailable", reason or "the target has no step ring"
        elif self._lapped_last_poll:
            state, reason = "lagging", "records were overwritten before they were read"
        elif off := [health for ring in rings if (health := ring.health()).switched_off]:
            missing = sum(health.unwritten for health in off)
            reason = "a writer switched itself off after repeated failures: "
            state, reason = "failed", f"{reason}{missing} records were not written"
        dropped = self._rings.dropped + self._tallies_dropped
        return SourceStatus(self.name, state, reason, dropped, cost_ns=self._cost_ns)

    def stop(self) -> None:
        self._rings.close()
