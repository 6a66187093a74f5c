"""One engine's steps in its accountant: read, joined to the kernel's facts, learnt from. Pure.

A clean step teaches the clean-step model, and which threads compute together (the gang).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dsagent.agent.attribution.join import Joiner, Watched, gang_shares
from dsagent.agent.attribution.model import CleanStepModel, Shape, shape
from dsagent.agent.attribution.pieces import Piece, cut
from dsagent.agent.attribution.recent import Recent
from dsagent.agent.facts import Facts
from dsagent.instrumentation.records import RankStep, RequestRecord, Step

MOST_WAITING = 20_000  # steps that wait for their facts
CLEAN_RATIO = 0.05
MOST_CLEAN_RATIO = 0.2
# A neighbour who is beside nearly all of so many steps, and of a window at least, is part of the
# machine.
CROWDED_RATIO = 0.95
CROWDED_STEPS = 256
GANG_RATIO = 0.2
GANG_STEPS = 64


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the accountant knows and no engine does."""

    attached_ns: int
    has_kernel: bool  # its facts come, and are waited for
    front_ends: frozenset[int]  # threads that received requests


@dataclass(slots=True)
class EngineSteps:
    """Times are CLOCK_MONOTONIC nanoseconds."""

    engine_id: int
    last: Step | None = None
    model: CleanStepModel = field(default_factory=CleanStepModel)
    gang: frozenset[int] = frozenset()
    pieces: list[Piece] = field(default_factory=list)  # joined, in their order
    ends: list[int] = field(default_factory=list)  # of each of them
    waiting: deque[Piece] = field(default_factory=deque)  # for their facts
    _recent: OrderedDict[int, Piece] = field(default_factory=OrderedDict)
    _rank_tids: frozenset[int] = frozenset()
    _gang_seen: OrderedDict[int, dict[int, float]] = field(default_factory=OrderedDict)
    _is_gang_new: bool = False  # steps have been seen that `gang` knows nothing of
    _crowded: deque[bool] = field(default_factory=lambda: deque(maxlen=CROWDED_STEPS))
    _delayed_ratios: Recent = field(default_factory=lambda: Recent(GANG_STEPS))

    def read(self, step: Step, ranks: Sequence[RankStep]) -> int:
        """The next step; returns how many that waited had to be given up for it."""
        last = self.last
        if last is None:  # before the first step that was read nothing was missed
            piece = cut(step, None, ranks=ranks)
        elif step.step_id == last.step_id + 1:
            piece = cut(step, last.end_ns, ranks=ranks)
        else:
            piece = cut(step, None, follows=False, ranks=ranks)
        self.waiting.append(piece)
        self.last = step
        self._recent[step.step_id] = piece
        while len(self._recent) > 4 * GANG_STEPS:
            self._recent.popitem(last=False)
        if len(self.waiting) <= MOST_WAITING:
            return 0
        self.waiting.popleft()
        return 1

    def see_threads(self, fresh: Iterable[Facts]) -> None:
        """Which threads ran in the steps of late, by facts that have just come."""
        for facts in fresh:
            for step_id, shares in gang_shares(facts, self._recent).items():
                seen = self._gang_seen.setdefault(step_id, {})
                for tid, ratio in shares.items():
                    seen[tid] = seen.get(tid, 0.0) + ratio
        while len(self._gang_seen) > 4 * GANG_STEPS:
            self._gang_seen.popitem(last=False)

    def join(self, ready: Sequence[Piece], facts: Facts, around: Surroundings) -> int:
        """Joins pieces, one at least, with all facts of their time; returns how many shares they
        hold, and each of them one more."""
        self._rank_tids = frozenset(p.rank.tid for p in ready if p.rank) or self._rank_tids
        joiner = Joiner(facts, self.watched(ready[-1].step))
        held = 0
        for piece in ready:
            joined = joiner.join(piece)
            whole = shape(piece.step.shares)
            self._learn(joined, whole, joiner, around)
            price = self.model.price(piece.step.shares, whole)
            self.pieces.append(joiner.priced(joined, price))
            self.ends.append(joined.end_ns)
            held += 1 + len(joined.shares)
        self._find_gang(around)
        return held

    def watched(self, step: Step) -> Watched:
        return Watched(step.pid, step.tid, self.gang, self._rank_tids)

    def reaches(self, moment_ns: int) -> bool:
        """Whether its steps are joined up to there."""
        return bool(self.ends) and self.ends[-1] >= moment_ns

    def pieces_of(self, record: RequestRecord) -> list[Piece]:
        """Those that overlap the request's life."""
        low = bisect_right(self.ends, record.received_ns)
        high = bisect_left(self.ends, record.sent_ns) + 1
        return self.pieces[low:high]

    def _is_clean(self, delayed_ratio: float) -> bool:
        """Less than 5 % known delay; on a machine that never gives that, the cleanest quarter."""
        self._delayed_ratios.append(delayed_ratio)
        cleanest = min(self._delayed_ratios.lower_quartile, MOST_CLEAN_RATIO)
        return delayed_ratio < CLEAN_RATIO or delayed_ratio < cleanest

    @property
    def _is_always_crowded(self) -> bool:
        known = len(self._crowded)
        return known >= GANG_STEPS and self._crowded.count(True) >= CROWDED_RATIO * known

    def _find_gang(self, around: Surroundings) -> None:
        if self._is_gang_new:
            # A front end that runs while the engine computes helps nobody to compute.
            self.gang = _gang(self._gang_seen.values()) - around.front_ends
            self._is_gang_new = False

    def _learn(self, piece: Piece, whole: Shape, joiner: Joiner, around: Surroundings) -> None:
        """A clean step, of the shape `whole`, teaches the model, and who is in the gang. One beside
        which somebody else was busy is none, unless they nearly all are so."""
        step = piece.step
        forward = [section for section in piece.sections if section.kind == "forward"]
        forward_ns = sum([section.ns for section in forward])
        if forward_ns <= 0 or step.start_ns < around.attached_ns:
            return  # what delayed it before we came, nobody has seen
        delayed_ns = sum([section.delayed_ns for section in forward])
        clean = self._is_clean(delayed_ns / forward_ns)
        ran = self._gang_seen.pop(step.step_id, None)
        if ran is not None and (clean or not self.gang):
            self._gang_seen[step.step_id] = ran
            while len(self._gang_seen) > GANG_STEPS:
                self._gang_seen.popitem(last=False)
            self._is_gang_new = True
            if not self.gang:
                self._find_gang(around)
        # As long as the gang is about to become known, what delayed it is not.
        known = self.gang or not around.has_kernel or len(self._delayed_ratios) == GANG_STEPS
        if not clean or not known or step.shares_omitted:
            return
        self._crowded.append(joiner.is_crowded(piece))
        if not self._crowded[-1] or self._is_always_crowded:
            self.model.observe(whole, forward_ns - delayed_ns)


def _gang(seen: Iterable[dict[int, float]]) -> frozenset[int]:
    """Threads that ran at least a fifth of forward, over the steps they ran in at all."""
    ratios: dict[int, list[float]] = {}
    for shares in seen:
        for tid, ratio in shares.items():
            ratios.setdefault(tid, []).append(ratio)
    return frozenset(tid for tid, found in ratios.items() if sum(found) / len(found) >= GANG_RATIO)
