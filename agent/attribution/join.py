"""Ties kernel facts to the engine's time line. Pure: no I/O, no clock.

In each section of a piece (pieces.py) the kernel's intervals are laid on the
time line by one fixed precedence, each nanosecond once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dsagent.agent.attribution.capacity import blame_by_capacity, occupied
from dsagent.agent.attribution.fact_store import FactRows
from dsagent.agent.attribution.holders import Holders
from dsagent.agent.attribution.model import Price
from dsagent.agent.attribution.pieces import EXECUTING, Blame, Delay, Piece, Section, alike, split
from dsagent.agent.facts import Facts, Kind

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
    (Kind.OFF_FSYNC, "io.block"),
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


# A busy sibling, or a shared cache and memory bus, may cost a core up to about half of its speed:
# more of the excess than that such evidence cannot explain. And less than a fifth of one CPU busy
# beside it is no evidence at all.
SLOWED_MOST_RATIO = 0.5
SLOWED_LEAST_RATIO = 0.2


@dataclass(frozen=True, slots=True)
class Watched:
    """Whose delay counts: the loop's own thread everywhere, its gang in forward; in a hand-over
    to the ranks and back, their loops' threads too.

    The gang is the threads that ran at least a fifth of forward in recent clean steps.
    """

    pid: int
    loop_tid: int
    gang: frozenset[int]
    rank_tids: frozenset[int] = frozenset()


_Near = tuple[int, ...]  # a fact's start_ns, end_ns and _COLUMNS
_Sum = tuple[int, int, int, int, int]  # a summed fact's kind, pid, tid, ns, count
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
    """Those whom the facts themselves name (who ended a wait), in proportion to its length; what
    names nobody is nobody's."""
    by_task: dict[tuple[int, int], int] = {}
    for _, start, end, pid, tid in intervals:
        by_task[pid, tid] = by_task.get((pid, tid), 0) + end - start
    sizes = zip(by_task.items(), split(ns, list(by_task.values())), strict=True)
    return tuple(Blame(*task, size) for (task, _), size in sizes if task[0] and size)


class Joiner:
    """One batch of facts, made ready to be laid on sections.

    What concerns many facts is done once, in arrays; only the few that hit a watched thread are
    looked at one by one."""

    def __init__(self, facts: Facts, watched: Watched) -> None:
        self._facts = facts
        self._watched = watched
        tids = {watched.loop_tid, *watched.gang, *watched.rank_tids}
        watched_tids = np.fromiter(tids, np.uint32)
        self._is_mine = _among(facts["tid"], watched_tids)
        exact = self._is_mine & (facts["exact"] == 1) & _IS_RANKED[facts["kind"]]
        self._exact = FactRows(facts[exact], _COLUMNS)
        self._holders = Holders(facts)
        self._busy_in: dict[tuple[int, int], tuple[dict[int, float], int]] = {}

    # Most sections need none of these: they are made when one does.
    @cached_property
    def _foreign(self) -> FactRows:
        return FactRows(self._facts[self._facts["kind"] == Kind.FOREIGN], ["culprit_pid", "ns"])

    @cached_property
    def _summed(self) -> dict[int, list[_Sum]]:
        return _sums(self._facts[self._is_mine & (self._facts["exact"] == 0)])

    def join(self, piece: Piece) -> Piece:
        """`piece` with all that the kernel measured in its sections."""
        near = self._near(piece.start_ns, piece.end_ns)
        sums = self._summed.get(piece.step.step_id, ())
        if not near and not sums:
            return piece
        rank_pid = None if piece.rank is None else piece.rank.pid
        return piece.laid([self._lay(s, near, sums, rank_pid) for s in piece.sections])

    def priced(self, piece: Piece, price: Price) -> Piece:
        """`piece` with its price. Once the model is fitted, no more is charged in forward than it
        took beyond that: a thread that waited while the others had its work done delayed nobody.
        Stops are certain and stay whole. What is still too long, while others were busy on the
        target's CPUs and took them from nobody, is slowness by their doing, as far as that can
        explain it."""
        sections = piece.sections
        if price.whole_ns is not None and price.fitted:
            sections = tuple(
                [
                    self._slowed(
                        _bounded(section, section.delays, section.ns - price.whole_ns), price
                    )
                    if section.kind == "forward"
                    else section
                    for section in sections
                ]
            )
        return piece.laid(sections, price, alike(sections, piece.rank))

    def _slowed(self, section: Section, price: Price) -> Section:
        excess_ns = section.ns - section.delayed_ns - price.most_ns
        if excess_ns <= 0:
            return section
        busy, beside_ns, facts = self._beside(section)
        if beside_ns < SLOWED_LEAST_RATIO * section.ns:
            return section
        ns = min(excess_ns, round(beside_ns * SLOWED_MOST_RATIO))
        sizes = split(ns, list(busy.values()))
        blames = tuple(Blame(pid, 0, size) for pid, size in zip(busy, sizes, strict=True) if size)
        slowed = Delay("cpu.slowed", ns, facts, blames)
        return section._replace(delays=(*section.delays, slowed))

    def _beside(self, section: Section) -> tuple[dict[int, float], float, int]:
        """Who ran on the target's CPUs, for how long all in all without taking one away, and by
        how many facts."""
        busy, facts = self._busy(section)
        if not facts:
            return {}, 0.0, 0
        queued_ns = sum([d.ns for d in section.delays if d.cause == "cpu.runqueue"])
        return busy, sum(busy.values()) - queued_ns, facts

    def _busy(self, section: Section) -> tuple[dict[int, float], int]:
        """pid → nanoseconds that strangers ran on the target's CPUs, by how many facts. The same
        section is asked for when it is laid out, judged and priced."""
        found = self._busy_in.get((section.start_ns, section.end_ns))
        if found is None:
            foreign = self._foreign.overlapping(section.start_ns, section.end_ns)
            found = occupied(foreign, section.start_ns, section.end_ns), len(foreign)
            self._busy_in[section.start_ns, section.end_ns] = found
        return found

    def is_crowded(self, piece: Piece) -> bool:
        """Whether somebody else was so busy beside the forward pass that it may have been slower
        for it."""
        return any(
            self._beside(section)[1] >= SLOWED_LEAST_RATIO * section.ns
            for section in piece.sections
            if section.kind == "forward"
        )

    def section(self, section: Section, rank_pid: int | None = None) -> Section:
        """`section` with its delays. Summed facts have no place in one that was cut."""
        return self._lay(section, self._near(section.start_ns, section.end_ns), None, rank_pid)

    def _near(self, start_ns: int, end_ns: int) -> list[_Near]:
        return self._exact.overlapping(start_ns, end_ns)

    def _lay(
        self,
        section: Section,
        near: list[_Near],
        sums: Sequence[_Sum] | None,
        rank_pid: int | None,
    ) -> Section:
        """`sums`: of the step; None for a section that was cut. `rank_pid`: the process of the rank
        that executed; None where the loop did so itself."""
        if not near:
            if section.kind != "forward" or not sums:
                return section
            return self._blamed(section, [*_summed(sums, rank_pid)])
        executing = section.kind in EXECUTING
        gang = self._watched.gang
        alone = {self._watched.loop_tid}
        if section.kind == "hand-over":
            alone |= self._watched.rank_tids
        intervals = [
            (
                _RANK[kind],
                start,
                end,
                *self._holders.of(kind, tid, start, end, culprit_pid, culprit_tid),
            )
            for start, end, kind, pid, tid, culprit_pid, culprit_tid in near
            if start < section.end_ns
            and end > section.start_ns
            and (rank_pid in (None, pid) if executing else tid in alone)
            # A futex sleep ended by a team-mate is a team meeting at a barrier, not a lock.
            and not (executing and kind == Kind.OFF_FUTEX and culprit_tid in gang)
        ]
        delays = lay(intervals, section.start_ns, section.end_ns) if intervals else []
        if section.kind == "forward" and sums is not None:
            delays = _merge([*delays, *_summed(sums, rank_pid)])
        return self._blamed(section, delays)

    def _blamed(self, section: Section, delays: Sequence[Delay]) -> Section:
        """With whom to blame for the CPU that was taken."""
        delays = [
            self._with_capacity(delay, section) if delay.cause == "cpu.runqueue" else delay
            for delay in delays
        ]
        return _bounded(section, delays, section.ns)

    def _with_capacity(self, delay: Delay, section: Section) -> Delay:
        blames = blame_by_capacity(self._busy(section)[0], delay.ns, self._watched.pid)
        return Delay(delay.cause, delay.ns, delay.facts, blames)


_RANK = {int(kind): rank for rank, (kind, _) in enumerate(PRECEDENCE)}
_IS_RANKED = np.isin(np.arange(256), list(_RANK))  # by kind
_SUMMED_CAUSE = {int(kind): cause for kind, cause in SUMMED_CAUSES.items()}
_IS_SUMMED = np.isin(np.arange(256), list(SUMMED_CAUSES))
_FEW = 4
_COLUMNS = ["kind", "pid", "tid", "culprit_pid", "culprit_tid"]


def _among(numbers: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """np.isin, which takes its time over a few."""
    if len(wanted) > _FEW:
        return np.isin(numbers, wanted)
    found = np.zeros(len(numbers), np.bool_)
    for each in wanted:
        found |= numbers == each
    return found


def _sums(facts: Facts) -> dict[int, list[_Sum]]:
    """step_id → what was too short to have a place in it."""
    by_step: dict[int, list[_Sum]] = {}
    chosen = facts[_IS_SUMMED[facts["kind"]]]
    for step_id, *row in chosen[["step_id", "kind", "pid", "tid", "ns", "count"]].tolist():
        by_step.setdefault(step_id, []).append((row[0], row[1], row[2], row[3], row[4]))
    return by_step


def _summed(sums: Sequence[_Sum], rank_pid: int | None) -> Iterator[Delay]:
    """Per cause the most that one thread lost in the step (a lower bound of the union over the
    threads); where a rank executed, only of its threads."""
    losses: dict[tuple[int, int], int] = {}
    counts: dict[int, int] = {}
    for kind, pid, tid, ns, count in sums:
        if rank_pid is None or pid == rank_pid:
            losses[kind, tid] = losses.get((kind, tid), 0) + ns
            counts[kind] = counts.get(kind, 0) + count
    most: dict[int, int] = {}
    for (kind, _), ns in losses.items():
        if ns > most.get(kind, 0):
            most[kind] = ns
    for kind, count in counts.items():
        if kind in most:
            yield Delay(_SUMMED_CAUSE[kind], most[kind], count)


def no_more_than(part: Section, whole: Section) -> Section:
    """A part cut out of `whole`, charged for each cause with no more than the whole is."""
    most = {delay.cause: delay.ns for delay in whole.delays}
    delays = []
    for delay in part.delays:
        ns = min(delay.ns, most.get(delay.cause, 0))
        if ns:
            delays.append(Delay(delay.cause, ns, delay.facts, _scaled(delay.blames, ns)))
    return part._replace(delays=tuple(delays))


def _bounded(section: Section, delays: Sequence[Delay], most_ns: int) -> Section:
    """All but stops shrink, in proportion, until all fit into `most_ns`."""
    if not delays:
        return section if not section.delays else section._replace(delays=())
    hard = [delay for delay in delays if delay.cause == "process.stopped"]
    if not hard and sum([delay.ns for delay in delays]) <= most_ns:
        return section if delays is section.delays else _with(section, delays)
    soft = [delay for delay in delays if delay.cause != "process.stopped"] if hard else delays
    room_ns = max(0, most_ns - sum([delay.ns for delay in hard]))
    if sum([delay.ns for delay in soft]) > room_ns:
        sizes = split(room_ns, [delay.ns for delay in soft])
        soft = [
            Delay(delay.cause, ns, delay.facts, _scaled(delay.blames, ns))
            for delay, ns in zip(soft, sizes, strict=True)
            if ns > 0
        ]
    return _with(section, (*hard, *soft))


def _with(section: Section, delays: Sequence[Delay]) -> Section:
    return Section(section.kind, section.start_ns, section.end_ns, tuple(delays))


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


def gang_shares(facts: Facts, pieces: Mapping[int, Piece]) -> dict[int, dict[int, float]]:
    """step_id → tid → share of the step's forward time that the thread ran; where ranks execute,
    only of the slowest one's threads."""
    ran = facts[facts["kind"] == Kind.ONCPU]
    shares: dict[int, dict[int, float]] = {}
    for step_id, pid, tid, ns in ran[["step_id", "pid", "tid", "ns"]].tolist():
        piece = pieces.get(step_id)
        if piece is None:
            continue
        rank = piece.rank
        forward_ns = piece.step.forward_ns if rank is None else rank.end_ns - rank.start_ns
        if forward_ns > 0 and (rank is None or pid == rank.pid):
            by_tid = shares.setdefault(step_id, {})
            by_tid[tid] = by_tid.get(tid, 0.0) + ns / forward_ns
    return shares
