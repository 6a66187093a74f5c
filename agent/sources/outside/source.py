"""The source "steps" of an engine into which nothing was put: what its messages and marks tell.

It stands where the rings' source stands, and brings the same records, each
labelled as inferred.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Event, Readings, SourceState, SourceStatus, Target
from dsagent.agent.host import procfs
from dsagent.agent.sources.kernel import check
from dsagent.agent.sources.outside.capture import Capture
from dsagent.agent.sources.outside.exchanges import Exchanges, Heard, Kind, Moved
from dsagent.agent.sources.outside.lives import Lives, MarkedBy
from dsagent.agent.sources.outside.markers import Found, find_markers
from dsagent.agent.sources.outside.messages import Message, MessageKind
from dsagent.agent.sources.outside.steps import Mark
from dsagent.agent.sources.outside.unseen import rings_of_io_uring, sentence

if TYPE_CHECKING:
    from dsagent.agent.sources.bpf.loader import Loaded

DISCOVER_NS = 1_000_000_000
MARKERS_EVERY = 10  # discoveries: what is mapped is looked at again so often
CLIENT_LEFT_NS = 1_000_000_000  # a reply that was not gone on with for so long is not
SILENT_NS = 3_600_000_000_000  # a reply that is not begun or gone on with for an hour never is
PACE_STEPS = 2048

_MOVES: dict[MessageKind, Kind] = {
    MessageKind.RECEIVED: "received",
    MessageKind.SENT: "sent",
    MessageKind.UNREAD: "sent",
    MessageKind.PEER_CLOSED: "peer closed",
    MessageKind.CLOSED: "closed",
}
_MARKED_BY: Mapping[MarkedBy, str] = {
    "sends": "the engine's core sends its output",
    "text": "text is sent",
}


class OutsideSource:
    """agent/facts.py's Source, with what the session asks of the rings' source besides."""

    name = "steps"

    def __init__(self, target: Target, make_capture: Callable[[], Capture] = Capture) -> None:
        self._target = target
        self._make_capture = make_capture
        self._capture: Capture | None = None
        self._last = SourceStatus(self.name, "unavailable", "not started")
        engine = hashlib.blake2b(f"{target.pid}/{target.start_ticks}".encode(), digest_size=8)
        self._exchanges = Exchanges()
        self._lives = Lives(int.from_bytes(engine.digest(), "little") or 1)
        self._tree = procfs.ProcessTree()
        self._next_discovery_ns = 0
        self._discoveries = 0
        self._markers: Found | None = None
        self._front_ends: set[int] = set()  # processes that read requests
        self._cores: tuple[int, ...] = ()  # processes whose sends mark the steps
        self._marking: list[str] = []  # why some marks are not seen
        self._tags: Loaded | None = None
        self._mark_pid = 0
        self._ciphered = 0
        self._unread = 0
        self._rings = 0
        self._cost_ns = 0
        self._uncounted_losses = 0
        self._pace = deque[int](maxlen=PACE_STEPS)
        self.attached_ns = time.monotonic_ns()
        self.behind = False
        self.last_step_end_ns: int | None = None
        self.pids: tuple[int, ...] = (target.pid, *target.children)

    def start(self) -> None:
        check()
        self._capture = self._make_capture()
        try:
            self._discover(time.monotonic_ns())
            self._capture.attach()
        except BaseException:
            self.stop()
            raise

    def poll(self, now_ns: int) -> Readings:
        began_ns = time.thread_time_ns()
        readings = Readings()
        if now_ns >= self._next_discovery_ns:
            readings.events += self._discover(now_ns)
        if self._capture is None:
            return readings
        heard, marks, sends = Heard(), list[Mark](), list[Mark]()
        for message in self._capture.read():
            self._sort(message, heard, marks, sends)
        self.behind = self._capture.behind
        self._exchanges.client_left(now_ns - CLIENT_LEFT_NS, heard)
        self._exchanges.silent(now_ns - SILENT_NS, heard)
        self._lives.hear(heard, marks, readings, sends)
        self._lives.tell(now_ns, readings)
        for step in readings.steps:
            self._pace.append(step.end_ns - step.start_ns)
            self.last_step_end_ns = max(self.last_step_end_ns or 0, step.end_ns)
        readings.closed = [r for r in readings.closed if r.sent_ns >= self.attached_ns]
        self._cost_ns += time.thread_time_ns() - began_ns
        return readings

    def _sort(self, message: Message, heard: Heard, marks: list[Mark], sends: list[Mark]) -> None:
        match message.kind:
            case MessageKind.MARK:
                self._mark_pid = message.pid
                marks.append(Mark(message.step, message.time_ns, message.pid, message.tid))
            case MessageKind.CIPHERED:
                self._ciphered += 1
            case MessageKind.LOCAL if message.connection not in self._front_ends:
                pass  # to its workers, or itself
            case MessageKind.LOCAL:
                sends.append(Mark(0, message.time_ns, message.pid, message.tid))
            case MessageKind.UNREAD if not message.connection:
                self._unread += 1
            case _:
                if message.kind is MessageKind.RECEIVED:
                    self._front_ends.add(message.pid)
                self._exchanges.hear(
                    Moved(
                        _MOVES[message.kind],
                        message.connection,
                        message.time_ns,
                        message.pid,
                        message.tid,
                        message.arrived_ns,
                        message.length,
                        message.data,
                        message.tail,
                    ),
                    heard,
                )

    def _discover(self, now_ns: int) -> list[Event]:
        """Follows the target's processes, and what they have mapped."""
        self._next_discovery_ns = now_ns + DISCOVER_NS
        pids = (self._target.pid, *procfs.descendants(self._target.pid, self._tree.parents()))
        events = [
            Event("child.started", now_ns, f"process {pid} has joined the target")
            for pid in sorted(set(pids) - set(self.pids))
        ]
        events += [
            Event("child.ended", now_ns, f"process {pid} has left the target")
            for pid in sorted(set(self.pids) - set(pids))
        ]
        changed = bool(events)
        self.pids = pids
        self._front_ends.intersection_update(pids)
        if self._capture is None:
            return events
        self._capture.follow(pids, self._cores)
        if self._mark_pid and self._mark_pid not in pids:
            self._mark_pid = 0
            self._capture.mark_any_process()
        if changed or self._discoveries % MARKERS_EVERY == 0:
            self._rings = rings_of_io_uring(pids)
            self._look_for_markers(pids)
            self._choose_marks(pids)
        self._discoveries += 1
        return events

    def _look_for_markers(self, pids: Sequence[int]) -> None:
        found = find_markers(pids)
        if found is not None and (not self._markers or found.inodes != self._markers.inodes):
            self._markers = found
            self._mark()

    def _mark(self) -> None:
        if self._capture is None or self._markers is None:
            return
        base = None if self._tags is None else self._tags.base
        try:
            self._marking = self._capture.mark(self._markers.places, base)
        except SourceUnavailable as error:
            self._marking = [str(error)]

    def _choose_marks(self, pids: Sequence[int]) -> None:
        """A function that is entered once a step; else what a core sends; else the text."""
        if self._markers is not None and len(self._marking) < len(self._markers.places):
            self._cores, self._lives.marked_by = (), "function"
            return
        self._cores = tuple(pid for pid in pids if _is_core(pid))
        self._lives.marked_by = "sends" if self._cores else "text"
        if self._capture is not None:
            self._capture.follow(pids, self._cores)

    def tag(self, loaded: Loaded | None) -> None:
        """The kernel source's programs, which from now on are told which step runs."""
        if loaded is not self._tags:
            self._tags = loaded
            self._mark()

    def counted(self) -> Mapping[str, float] | None:
        """What has been seen so far, by metrics/served.py's keys; None while it may yet change."""
        if not self._lives.at_rest:
            return None
        totals = self._lives.totals
        counts = {
            "requests.finished": float(totals.requests),
            "tokens.generated": float(totals.tokens),
        }
        if self._lives.marked_by == "function":
            counts["steps"] = float(totals.steps)
            counts["steps.yielding"] = float(totals.steps_with_text)
        return counts

    def leave_unread(self) -> None:
        """After the last poll: what it has left is not read any more."""

    def look_again(self) -> None:
        """Look for new processes at the next poll."""
        self._next_discovery_ns = 0

    def new_step_words(self) -> dict[int, int]:
        """None: nothing in its memory says which step runs."""
        return {}

    def running(self) -> Sequence[tuple[int, int, int, int]]:
        """None: from outside it cannot be told from one that has ended."""
        return ()

    def step_p99_ns(self) -> int | None:
        if not self._pace:
            return None
        ordered = sorted(self._pace)
        return ordered[(len(ordered) - 1) * 99 // 100]

    def oldest_open_ns(self) -> int | None:
        return self._lives.oldest_open_ns()

    @property
    def unfinished(self) -> int:
        """Requests seen to begin and not to end."""
        return self._lives.open

    @property
    def unfinished_trace_ids(self) -> list[int]:
        return self._lives.open_trace_ids

    @property
    def uncounted_losses(self) -> int:
        """Messages that were told and neither came nor were counted as dropped."""
        if self._capture is not None:
            self._uncounted_losses = self._capture.uncounted_losses
        return self._uncounted_losses

    def status(self) -> SourceStatus:
        if self._capture is None:
            return self._last
        how = _MARKED_BY.get(self._lives.marked_by) or (self._markers and self._markers.says)
        marked = f"steps are inferred: {how}"
        unseen = sentence(self._ciphered, self._unread, self._rings, self._exchanges.lost)
        state: SourceState = "lagging" if self.behind else "ok"
        given_up = self._exchanges.given_up + self._lives.given_up + self._lives.steps.given_up
        self._last = SourceStatus(
            self.name,
            state,
            "; ".join(filter(None, (marked, *self._marking, unseen))),
            dropped=self._capture.dropped + given_up,
            cost_ns=self._cost_ns + self._capture.cost_ns,
        )
        return self._last

    def stop(self) -> None:
        if self._capture is not None:
            self.status()
            self._uncounted_losses = self._capture.uncounted_losses
            self._capture.close()
            self._capture = None


def _is_core(pid: int) -> bool:
    """vLLM's EngineCore, whose name is cut to 15 characters."""
    try:
        return procfs.read_stat(pid).comm.startswith("VLLM::EngineCor")
    except (procfs.ProcessGone, PermissionError):
        return False
