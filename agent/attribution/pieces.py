"""The engine's time line, cut at the output times of its steps. Pure.

The *piece* (output k−1, output k] belongs to step k, whatever overlaps it. It
has sections: the gap before the step began, host work, the forward pass, host
work after it. Where worker ranks tell when they ran it, the forward pass is
that of the slowest, between two hand-overs; what it took beyond all others is
a section of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from dsagent.agent.attribution.model import Price
from dsagent.instrumentation.records import RankStep, Share, Step

SectionKind = Literal["gap", "host", "hand-over", "forward", "slowest"]
_MANY = 48  # weights from which an array is quicker than a list
_EXACT = 1 << 53  # whole numbers below it are floats, too
EXECUTING: frozenset[SectionKind] = frozenset({"forward", "slowest"})


# Named tuples where a frozen dataclass would do: there are dozens of these a step, and they are
# made in half the time.


class Blame(NamedTuple):
    """Who took the time: a process (tid 0) or one of its threads; pid 0 is the kernel."""

    pid: int
    tid: int
    ns: int


class Delay(NamedTuple):
    """Wall time taken from one section by one cause."""

    cause: str
    ns: int
    facts: int  # kernel facts it rests on
    blames: tuple[Blame, ...] = ()


class Section(NamedTuple):
    kind: SectionKind
    start_ns: int
    end_ns: int
    delays: tuple[Delay, ...] = ()

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def delayed_ns(self) -> int:
        return sum([delay.ns for delay in self.delays]) if self.delays else 0


@dataclass(frozen=True, slots=True)
class Alike:
    """What every request in the step pays alike; its part of the forward pass is its own."""

    gap_ns: int
    host_ns: int
    hosts: int  # sections of host work
    longest_ns: int  # of these sections
    forward_ns: int  # less its delays
    delays: tuple[Delay, ...]


def alike(sections: Sequence[Section], rank: RankStep | None) -> Alike:
    """`sections` with all their delays; `rank`: the slowest, where ranks tell."""
    gap_ns = host_ns = hosts = longest_ns = forward_ns = 0
    delays: list[Delay] = []
    for section in sections:
        kind = section.kind
        rest_ns = section.ns
        for delay in section.delays:
            rest_ns -= delay.ns
            if delay.ns:
                delays.append(delay)
        if kind == "slowest" and rank is not None:
            delays.append(Delay("rank.wait", rest_ns, 0, (Blame(rank.pid, 0, rest_ns),)))
            continue
        if kind in EXECUTING:
            forward_ns += rest_ns
            continue
        longest_ns = max(longest_ns, rest_ns)
        if kind == "gap":
            gap_ns += rest_ns
        else:
            host_ns += rest_ns
            hosts += rest_ns > 0
    return Alike(gap_ns, host_ns, hosts, longest_ns, forward_ns, tuple(delays))


class Piece(NamedTuple):
    """(output k−1, output k] of step k."""

    step: Step
    start_ns: int
    end_ns: int
    sections: tuple[Section, ...]
    follows: bool  # nothing lies unseen between this step and the one read before
    shares: Mapping[int, Share]  # by request_key
    price: Price | None = None  # None until joined
    rank: RankStep | None = None  # the slowest, where ranks tell
    alike: Alike | None = None  # None until joined

    def laid(
        self, sections: Sequence[Section], price: Price | None = None, alike: Alike | None = None
    ) -> Piece:
        """The same piece, its sections laid out anew."""
        return Piece(
            self.step,
            self.start_ns,
            self.end_ns,
            tuple(sections),
            self.follows,
            self.shares,
            price,
            self.rank,
            alike,
        )


def cut(
    step: Step,
    previous_output_ns: int | None,
    *,
    follows: bool = True,
    ranks: Sequence[RankStep] = (),
) -> Piece:
    """The piece of `step`, its sections still without delays. With overlapping steps (async
    scheduling) what lies before the previous output belongs to the step before. Without a
    previous output it begins with the step; `follows` says whether steps are missing there."""
    start_ns = step.start_ns if previous_output_ns is None else previous_output_ns
    start_ns = min(start_ns, step.end_ns)
    sections: list[Section] = []
    by_end = sorted(ranks, key=lambda rank: rank.end_ns) if ranks else ranks
    bounds: tuple[tuple[SectionKind, int, int], ...] = (
        ("gap", start_ns, step.start_ns),
        ("host", step.start_ns, step.forward_start_ns),
        *_execution(step, by_end),
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
    slowest = by_end[-1] if by_end else None
    return Piece(step, start_ns, step.end_ns, tuple(sections), follows, shares, rank=slowest)


def _execution(step: Step, by_end: Sequence[RankStep]) -> Iterator[tuple[SectionKind, int, int]]:
    """The bounds of the forward pass as the scheduler saw it."""
    start_ns, end_ns = step.forward_start_ns, step.forward_end_ns
    if not by_end:
        yield "forward", start_ns, end_ns
        return
    slowest = by_end[-1]
    # A lone rank is behind nobody.
    others_ns = by_end[-2].end_ns if len(by_end) > 1 else slowest.end_ns
    yield "hand-over", start_ns, slowest.start_ns
    yield "forward", slowest.start_ns, min(others_ns, end_ns)
    yield "slowest", others_ns, min(slowest.end_ns, end_ns)
    yield "hand-over", slowest.end_ns, end_ns


def split(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole parts proportional to `weights`, by largest remainder; they add up to
    `total`, unless no weight is positive (then all are 0)."""
    whole = float(sum(weight for weight in weights if weight > 0))
    if whole <= 0 or total <= 0:
        return [0] * len(weights)
    if len(weights) == 1:
        return [total]
    if len(weights) >= _MANY and total * max(whole, 1.0) < _EXACT:
        return _split_many(total, weights, whole)
    exact = [total * max(weight, 0.0) / whole for weight in weights]
    parts = [int(share) for share in exact]
    rest = total - sum(parts)
    order = sorted(range(len(parts)), key=lambda i: exact[i] - parts[i], reverse=True)
    for i in order[:rest] if rest >= 0 else ():
        parts[i] += 1
    # Beyond 2**53 the float shares may miss the total by a little: the largest takes it.
    parts[max(range(len(parts)), key=parts.__getitem__)] += total - sum(parts)
    return parts


def _split_many(total: int, weights: Sequence[float], whole: float) -> list[int]:
    """The same, to the last nanosecond: each request of a large batch is shared out over all the
    others, in each of its steps."""
    exact = total * np.maximum(np.asarray(weights, dtype=np.float64), 0.0) / whole
    parts = exact.astype(np.int64)
    rest = total - int(parts.sum())
    parts[np.argsort(parts - exact, kind="stable")[: max(rest, 0)]] += 1
    parts[int(parts.argmax())] += total - int(parts.sum())
    return parts.tolist()  # type: ignore[no-any-return]
