"""Ties kernel facts to the engine's time line. Pure: no I/O, no clock.

The engine's time is cut at the output times of its steps: the *piece*
(output k−1, output k] belongs to step k, whatever overlaps it. A piece has
sections: the gap before the step began, host work, the forward pass, host
work after it. In each section the kernel's intervals are laid on the time
line by one fixed precedence, each nanosecond once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dsagent.agent.fact_store import FactIndex
from dsagent.agent.facts import Facts, Kind
from dsagent.agent.model import Price
from dsagent.instrumentation.records import Share, Step

SectionKind = Literal["gap", "host", "forward"]

# Which kernel fact speaks for which cause; the order is the precedence.
PRECEDENCE: tuple[tuple[Kind, str], ...] = (
    (Kind.STOPPED, "process.stopped"),
    (Kind.THROTTLED, "cpu.throttled"),
    (Kind.RUNQUEUE, "cpu.runqueue"),
    (Kind.STEAL, "cpu.steal"),
    (Kind.IRQ, "cpu.irq"),
    (Kind.MAJOR_FAULT, "memory.major_fault"),
    (Kind.RECLAIM, "memory.reclaim"),
    (Kind.OFF_DISK, "io.block"),
    (Kind.MINOR_FAULT, "memory.minor_fault"),
    (Kind.RETRANSMIT, "net.retransmit"),
    (Kind.BACKPRESSURE, "net.backpressure"),
    (Kind.OFF_FUTEX, "lock.wait"),
)
# Short ones are summed in the kernel without their place in the step; of these
# a short futex sleep is not charged, since it is how a team of threads meets at
# a barrier.
SUMMED_CAUSES = {
    Kind.THROTTLED: "cpu.throttled",
    Kind.RUNQUEUE: "cpu.runqueue",
    Kind.STEAL: "cpu.steal",
    Kind.IRQ: "cpu.irq",
    Kind.MAJOR_FAULT: "memory.major_fault",
    Kind.MINOR_FAULT: "memory.minor_fault",
    Kind.RECLAIM: "memory.reclaim",
}


@dataclass(frozen=True, slots=True)
class Blame:
    """Who took the time: a process (tid 0) or one of its threads; pid 0 is the kernel."""

    pid: int
    tid: int
    ns: int


@dataclass(frozen=True, slots=True)
class Delay:
    """Wall time taken from one section by one cause."""

    cause: str
    ns: int
    facts: int  # kernel facts it rests on
    blames: tuple[Blame, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    kind: SectionKind
    start_ns: int
    end_ns: int
    delays: tuple[Delay, ...] = ()

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def delayed_ns(self) -> int:
        return sum(delay.ns for delay in self.delays)


@dataclass(frozen=True, slots=True)
class Piece:
    """(output k−1, output k] of step k."""

    step: Step
    start_ns: int
    end_ns: int
    sections: tuple[Section, ...]
    follows: bool  # nothing lies unseen between this step and the one read before
    shares: Mapping[int, Share]  # by request_key
    price: Price | None = None  # None until joined


@dataclass(frozen=True, slots=True)
class Watched:
    """Whose delay counts: the loop's own thread everywhere, its gang in forward.

    The gang is the threads that ran at least a fifth of forward in recent clean steps.
    """

    pid: int
    loop_tid: int
    gang: frozenset[int]


def cut(step: Step, previous_output_ns: int | None, *, follows: bool = True) -> Piece:
    """The piece of `step`, its sections still without delays. With overlapping steps (async
    scheduling) what lies before the previous output belongs to the step before. Without a
    previous output it begins with the step; `follows` says whether steps are missing there."""
    start_ns = step.start_ns if previous_output_ns is None else previous_output_ns
    start_ns = min(start_ns, step.end_ns)
    sections: list[Section] = []
    bounds: tuple[tuple[SectionKind, int, int], ...] = (
        ("gap", start_ns, step.start_ns),
        ("host", step.start_ns, step.forward_start_ns),
        ("forward", step.forward_start_ns, step.forward_end_ns),
        ("host", step.forward_end_ns, step.end_ns),
    )
    reached_ns = start_ns
    for kind, from_ns, to_ns in bounds:
        high_ns = min(max(to_ns, reached_ns), step.end_ns)
        low_ns = min(max(from_ns, reached_ns), high_ns)
        if high_ns > low_ns:
            sections.append(Section(kind, low_ns, high_ns))
        reached_ns = high_ns
    shares = {share.request_key: share for share in step.shares}
    return Piece(step, start_ns, step.end_ns, tuple(sections), follows, shares)


Interval = tuple[int, int, int, int, int]  # rank in PRECEDENCE, start, end, culprit pid, its tid


def lay(intervals: Sequence[Interval], start_ns: int, end_ns: int) -> list[Delay]:
    """The delays within [start_ns, end_ns): the union over the threads, each nanosecond once, by
    `PRECEDENCE`."""
    by_rank: dict[int, list[Interval]] = {}
    for interval in intervals:
        by_rank.setdefault(interval[0], []).append(interval)
    laid: list[tuple[int, int]] = []
    covered_ns = 0
    delays = []
    for rank in sorted(by_rank):
        chosen = by_rank[rank]
        laid += [(max(start, start_ns), min(end, end_ns)) for _, start, end, _, _ in chosen]
        union_ns = _union_ns(laid)
        fresh_ns, covered_ns = union_ns - covered_ns, union_ns
        if fresh_ns:
            cause = PRECEDENCE[rank][1]
            delays.append(Delay(cause, fresh_ns, len(chosen), _culprits(chosen, fresh_ns)))
    return delays


def _union_ns(intervals: list[tuple[int, int]]) -> int:
    intervals.sort()
    total = 0
    reached = -(1 << 63)
    for start, end in intervals:
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def _culprits(intervals: Sequence[Interval], ns: int) -> tuple[Blame, ...]:
    """Those whom the facts themselves name (who ended a wait), in proportion to its length."""
    by_task: dict[tuple[int, int], int] = {}
    for _, start, end, pid, tid in intervals:
        if pid:
            by_task[pid, tid] = by_task.get((pid, tid), 0) + end - start
    sizes = split(ns, list(by_task.values()))
    return tuple(Blame(p, t, size) for (p, t), size in zip(by_task, sizes, strict=True) if size)


class Joiner:
    """One batch of facts, made ready to be laid on sections.

    What concerns many facts is done once, in arrays; only the few that hit a watched thread are
    looked at one by one."""

    def __init__(self, facts: Facts, watched: Watched) -> None:
        self._watched = watched
        watched_tids = np.fromiter({watched.loop_tid, *watched.gang}, np.uint32)
        mine = facts[np.isin(facts["tid"], watched_tids)]
        exact = mine[(mine["exact"] == 1) & np.isin(mine["kind"], _RANKED)]
        self._exact = FactIndex(exact)
        self._foreign = FactIndex(facts[facts["kind"] == Kind.FOREIGN])
        self._summed = _summed(mine[mine["exact"] == 0])

    def join(self, piece: Piece) -> Piece:
        """`piece` with all that the kernel measured in its sections."""
        near = self._near(piece.start_ns, piece.end_ns)
        step_id = piece.step.step_id
        if not near and step_id not in self._summed:
            return piece
        return replace(piece, sections=tuple(self._lay(s, near, step_id) for s in piece.sections))

    def section(self, section: Section) -> Section:
        """`section` with its delays. Summed facts have no place in one that was cut."""
        return self._lay(section, self._near(section.start_ns, section.end_ns), None)

    def _near(self, start_ns: int, end_ns: int) -> list[tuple[int, int, int, int, int, int]]:
        found = self._exact.overlapping(start_ns, end_ns)
        return found[_COLUMNS].tolist() if len(found) else []

    def _lay(
        self,
        section: Section,
        near: list[tuple[int, int, int, int, int, int]],
        step_id: int | None,
    ) -> Section:
        in_forward = section.kind == "forward"
        gang, loop_tid = self._watched.gang, self._watched.loop_tid
        intervals = [
            (_RANK[kind], start, end, culprit_pid, culprit_tid)
            for kind, start, end, tid, culprit_pid, culprit_tid in near
            if start < section.end_ns
            and end > section.start_ns
            and (in_forward or tid == loop_tid)
            # A futex sleep ended by a team-mate is a team meeting at a barrier, not a lock.
            and not (in_forward and kind == Kind.OFF_FUTEX and culprit_tid in gang)
        ]
        delays = lay(intervals, section.start_ns, section.end_ns) if intervals else []
        if in_forward and step_id is not None:
            delays = _merge([*delays, *self._summed.get(step_id, ())])
        delays = [self._with_capacity(delay, section) for delay in delays]
        return _bounded(section, delays, section.ns)

    def _with_capacity(self, delay: Delay, section: Section) -> Delay:
        if delay.cause != "cpu.runqueue":
            return delay
        foreign = self._foreign.overlapping(section.start_ns, section.end_ns)
        blames = blame_by_capacity(
            foreign, section.start_ns, section.end_ns, delay.ns, self._watched.pid
        )
        return Delay(delay.cause, delay.ns, delay.facts, blames)


_RANK = {int(kind): rank for rank, (kind, _) in enumerate(PRECEDENCE)}
_RANKED = np.array(list(_RANK), np.uint8)
_COLUMNS = ["kind", "start_ns", "end_ns", "tid", "culprit_pid", "culprit_tid"]


def _summed(facts: Facts) -> dict[int, list[Delay]]:
    """step_id → delays too short to have a place: per cause the most that one thread lost in the
    step (a lower bound of the union over the threads)."""
    losses: dict[tuple[int, int], dict[int, int]] = {}
    counts: dict[tuple[int, int], int] = {}
    chosen = facts[np.isin(facts["kind"], np.array(list(SUMMED_CAUSES), np.uint8))]
    for step_id, kind, tid, ns, count in chosen[["step_id", "kind", "tid", "ns", "count"]].tolist():
        by_thread = losses.setdefault((step_id, kind), {})
        by_thread[tid] = by_thread.get(tid, 0) + ns
        counts[step_id, kind] = counts.get((step_id, kind), 0) + count
    delays: dict[int, list[Delay]] = {}
    for (step_id, kind), by_thread in losses.items():
        ns = max(by_thread.values())
        if ns > 0:
            delay = Delay(SUMMED_CAUSES[Kind(kind)], ns, counts[step_id, kind])
            delays.setdefault(step_id, []).append(delay)
    return delays


def blame_by_capacity(
    foreign: Facts, start_ns: int, end_ns: int, ns: int, own_pid: int
) -> tuple[Blame, ...]:
    """Who took the CPU for `ns` of [start_ns, end_ns): the tasks outside the target that occupied
    the CPUs it may use, in proportion. Who came next on that CPU says little: it is often the
    target's own other thread. What they did not occupy, the target's own threads did.

    `foreign`: facts of kind FOREIGN."""
    by_pid: dict[int, float] = {}
    for pid, begin, finish, ran in foreign[["culprit_pid", "start_ns", "end_ns", "ns"]].tolist():
        overlap = min(finish, end_ns) - max(begin, start_ns)
        if overlap > 0:
            by_pid[pid] = by_pid.get(pid, 0.0) + ran * overlap / (finish - begin)
    occupied = sum(by_pid.values())
    if ns > occupied:
        by_pid[own_pid] = by_pid.get(own_pid, 0.0) + ns - occupied
    pids = list(by_pid)
    return tuple(
        Blame(pid, 0, share)
        for pid, share in zip(pids, split(ns, [by_pid[pid] for pid in pids]), strict=True)
        if share
    )


def priced(piece: Piece, price: Price) -> Piece:
    """`piece` with its price, and with no more charged in forward than it took beyond that: a
    thread that waited while the others had its work done delayed nobody. Stops are certain and
    stay whole."""
    sections = piece.sections
    if price.whole_ns is not None:
        sections = tuple(
            _bounded(section, section.delays, section.ns - price.whole_ns)
            if section.kind == "forward"
            else section
            for section in sections
        )
    return replace(piece, sections=sections, price=price)


def no_more_than(part: Section, whole: Section) -> Section:
    """A part cut out of `whole`, charged for each cause with no more than the whole is."""
    most = {delay.cause: delay.ns for delay in whole.delays}
    delays = []
    for delay in part.delays:
        ns = min(delay.ns, most.get(delay.cause, 0))
        if ns:
            delays.append(Delay(delay.cause, ns, delay.facts, _scaled(delay.blames, ns)))
    return replace(part, delays=tuple(delays))


def _bounded(section: Section, delays: Sequence[Delay], most_ns: int) -> Section:
    """All but stops shrink, in proportion, until all fit into `most_ns`."""
    hard = [delay for delay in delays if delay.cause == "process.stopped"]
    soft = [delay for delay in delays if delay.cause != "process.stopped"]
    room_ns = max(0, most_ns - sum(delay.ns for delay in hard))
    if sum(delay.ns for delay in soft) > room_ns:
        sizes = split(room_ns, [delay.ns for delay in soft])
        soft = [
            Delay(delay.cause, ns, delay.facts, _scaled(delay.blames, ns))
            for delay, ns in zip(soft, sizes, strict=True)
            if ns > 0
        ]
    return Section(section.kind, section.start_ns, section.end_ns, (*hard, *soft))


def _merge(delays: Sequence[Delay]) -> list[Delay]:
    by_cause: dict[str, Delay] = {}
    for delay in delays:
        known = by_cause.get(delay.cause)
        by_cause[delay.cause] = (
            delay
            if known is None
            else Delay(delay.cause, known.ns + delay.ns, known.facts + delay.facts, known.blames)
        )
    return list(by_cause.values())


def _scaled(blames: tuple[Blame, ...], ns: int) -> tuple[Blame, ...]:
    sizes = split(min(ns, sum(b.ns for b in blames)), [b.ns for b in blames])
    return tuple(Blame(b.pid, b.tid, size) for b, size in zip(blames, sizes, strict=True) if size)


def split(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole parts proportional to `weights`, by largest remainder; they add up to
    `total`, unless no weight is positive (then all are 0)."""
    whole = float(sum(weight for weight in weights if weight > 0))
    if whole <= 0 or total <= 0:
        return [0] * len(weights)
    exact = [total * max(weight, 0.0) / whole for weight in weights]
    parts = [int(share) for share in exact]
    rest = total - sum(parts)
    order = sorted(range(len(parts)), key=lambda i: exact[i] - parts[i], reverse=True)
    for i in order[:rest] if rest >= 0 else ():
        parts[i] += 1
    # Beyond 2**53 the float shares may miss the total by a little: the largest takes it.
    parts[max(range(len(parts)), key=parts.__getitem__)] += total - sum(parts)
    return parts


def gang_shares(facts: Facts, steps: Mapping[int, Step]) -> dict[int, dict[int, float]]:
    """step_id → tid → share of the step's forward time that the thread ran."""
    ran = facts[facts["kind"] == Kind.ONCPU]
    ran = ran[np.isin(ran["step_id"], np.fromiter(steps, np.uint64))]
    shares: dict[int, dict[int, float]] = {}
    for step_id, tid, ns in ran[["step_id", "tid", "ns"]].tolist():
        forward_ns = steps[step_id].forward_ns
        if forward_ns > 0:
            by_tid = shares.setdefault(step_id, {})
            by_tid[tid] = by_tid.get(tid, 0.0) + ns / forward_ns
    return shares
