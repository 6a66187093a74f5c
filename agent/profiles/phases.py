"""Ties samples to the engine's steps: which phase ran when each was taken. Pure.

A sample is tied by its time. Repeats have none: py-spy only counts them. They can only have been
taken of a thread that computed, while nothing else was seen of it; so they are given to the loops'
own threads, spread over the time in their steps in which no change was seen. What finds no place
there is kept as a frame of its own, so that the sum is right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from dsagent.agent.profiles.stacks import Frame, Recorded, Seen
from dsagent.instrumentation.records import RankStep, Step

Phase = Literal["prefill", "decode", "mixed", "idle"]
KEPT_STEPS = 65_536
MOST_WAITING = 4_096
MOST_RANKS = 256  # of one step
MOST_PROCESSES = 64  # with steps of their own
NOT_PLACED = Frame("(seen again, unknown when)", "", 0)


@dataclass(frozen=True, slots=True)
class Span:
    """A step, or a rank's part of it."""

    start_ns: int
    end_ns: int
    tid: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Weighed:
    """A stack with what it stands for. `phase`: None where nothing tells. `samples`: those seen
    with their time are 1 each, the repeats given to one are a share of them."""

    frames: tuple[Frame, ...]
    thread: str
    role: str
    phase: Phase | None
    samples: float


class Steps:
    """The latest steps of all engines, by process."""

    def __init__(self) -> None:
        self._spans: dict[int, deque[Span]] = {}
        self._phases: dict[tuple[int, int], Phase] = {}  # by engine and step
        self._waiting: dict[tuple[int, int], list[RankStep]] = {}  # for their schedulers' word
        self._roles: dict[int, str] = {}

    def add(self, steps: Iterable[Step], rank_steps: Iterable[RankStep]) -> None:
        """In the order in which they came."""
        for rank in rank_steps:
            key = (rank.engine_id, rank.step_id)
            waiting = self._waiting.setdefault(key, [])
            if len(waiting) < MOST_RANKS:
                waiting.append(rank)
            if len(self._waiting) > MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
        for step in steps:
            key = (step.engine_id, step.step_id)
            phase = phase_of(step)
            self._phases[key] = phase
            if len(self._phases) > KEPT_STEPS:
                del self._phases[next(iter(self._phases))]
            self._keep(step.pid, Span(step.start_ns, step.end_ns, step.tid, phase), "engine")
        for key in [key for key in self._waiting if key in self._phases]:
            for rank in self._waiting.pop(key):
                span = Span(rank.start_ns, rank.end_ns, rank.tid, self._phases[key])
                self._keep(rank.pid, span, "worker")

    def _keep(self, pid: int, span: Span, role: str) -> None:
        spans = self._spans.get(pid)
        if spans is None:
            if len(self._spans) >= MOST_PROCESSES:  # the one that was first is forgotten
                gone = next(iter(self._spans))
                del self._spans[gone], self._roles[gone]
            spans = self._spans[pid] = deque(maxlen=KEPT_STEPS)
        spans.append(span)
        if self._roles.get(pid) != "engine":
            self._roles[pid] = role

    def of(self, pid: int, began_ns: int, ended_ns: int) -> list[Span]:
        """Those that overlap, in the order of their starts. A process without steps of its own
        serves an engine: the only one's steps, or none where there are several."""
        spans = self._spans.get(pid)
        if spans is None and len(engines := self._engines()) == 1:
            spans = self._spans[engines[0]]
        overlapping = [s for s in spans or () if s.end_ns > began_ns and s.start_ns < ended_ns]
        return sorted(overlapping, key=lambda span: span.start_ns)

    def latest_end_ns(self, pid: int) -> int:
        """Until when is known what ran in that process, or in the engine that it serves."""
        spans = self._spans.get(pid)
        if spans is None and len(engines := self._engines()) == 1:
            spans = self._spans[engines[0]]
        return spans[-1].end_ns if spans else 0

    def role(self, pid: int) -> str:
        """engine (a scheduler's process), worker (a rank's), or frontend."""
        return self._roles.get(pid, "frontend")

    def _engines(self) -> list[int]:
        return [pid for pid, role in self._roles.items() if role == "engine"]


def phase_of(step: Step) -> Phase:
    if step.prefill_tokens and step.decode_tokens:
        return "mixed"
    return "prefill" if step.prefill_tokens else "decode"


def weigh(run: Recorded, spans: Sequence[Span], known_ns: int, role: str) -> list[Weighed]:
    """The run's samples with their phases. `spans`: the steps of its process, in the order of
    their starts; `known_ns`: no step that ended before is missing among them."""
    timeline = _Timeline(spans, known_ns)
    out = [
        Weighed(seen.frames, seen.thread, role, timeline.phase_at(seen.at_ns), 1.0)
        for seen in run.seen
    ]
    quiet = _quiet(run, spans)
    whole_ns = sum(ns for _, _, ns in quiet)
    # Silence between two samples is no repeat: only as many as there was time for.
    placed = min(float(run.repeats), whole_ns / max(1, run.interval_ns))
    if placed:
        out += [
            Weighed(seen.frames, seen.thread, role, phase, placed * ns / whole_ns)
            for seen, phase, ns in quiet
        ]
    if run.repeats - placed >= 0.5:
        out.append(Weighed((NOT_PLACED,), "", role, None, run.repeats - placed))
    return out


class _Timeline:
    def __init__(self, spans: Sequence[Span], known_ns: int) -> None:
        self._spans = spans
        self._starts = [span.start_ns for span in spans]
        self._known_ns = known_ns

    def phase_at(self, at_ns: int) -> Phase | None:
        """Where steps overlap, that of the one that began last."""
        last = bisect_right(self._starts, at_ns) - 1
        for index in range(last, max(-1, last - 8), -1):
            if self._spans[index].end_ns > at_ns:
                return self._spans[index].phase
        return "idle" if at_ns < self._known_ns else None


def _quiet(run: Recorded, spans: Sequence[Span]) -> list[tuple[Seen, Phase, int]]:
    """For each sample of a loop's thread the time in steps, by phase, until the next one of the
    same thread, of the run's end."""
    loops = {span.tid for span in spans}
    by_thread: dict[int, list[Seen]] = {}
    for seen in run.seen:
        if seen.tid in loops and seen.tid is not None:
            by_thread.setdefault(seen.tid, []).append(seen)
    found: list[tuple[Seen, Phase, int]] = []
    for tid, row in by_thread.items():
        own = _one_by_one(span for span in spans if span.tid == tid)
        ends = [span.end_ns for span in own]
        until = [later.at_ns for _, later in pairwise(row)] + [run.ended_ns]
        for seen, end_ns in zip(row, until, strict=True):
            for index in range(bisect_right(ends, seen.at_ns), len(own)):
                span = own[index]
                if span.start_ns >= end_ns:
                    break
                ns = min(end_ns, span.end_ns) - max(seen.at_ns, span.start_ns)
                if ns > 0:
                    found.append((seen, span.phase, ns))
    return found


def _one_by_one(spans: Iterable[Span]) -> list[Span]:
    """A thread does one thing at a time. Of steps that overlap all the same, as a process may
    claim, each counts from the end of those before: no moment is gone through twice."""
    found: list[Span] = []
    until_ns = 0
    for span in spans:
        if span.end_ns > until_ns:
            found.append(replace(span, start_ns=max(span.start_ns, until_ns)))
            until_ns = span.end_ns
    return found
