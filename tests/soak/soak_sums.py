"""Whether figures stay flat, and whether two books agree. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from soak_crowd import Asked

Verdict = Literal["ok", "FAILED"]
WARM_UP_RATIO = 0.2  # of the samples, at first, that are not judged


@dataclass(frozen=True, slots=True)
class Bound:
    """May grow by `step`, whatever the time, and by `an_hour` for each hour more."""

    step: float
    an_hour: float = 0.0

    def over(self, hours: float) -> float:
        return self.step + self.an_hour * hours


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `start` and `end`: medians of the first and the last few samples."""

    name: str
    unit: str
    start: float
    end: float
    most: float
    slope_an_hour: float | None  # None where too little was seen
    bound: str
    verdict: Verdict


def slope(samples: Sequence[tuple[float, float]]) -> float | None:
    """The median slope between any two samples (Theil and Sen): no single outlier moves it."""
    slopes = [
        (y2 - y1) / (x2 - x1)
        for i, (x1, y1) in enumerate(samples)
        for x2, y2 in samples[i + 1 :]
        if x2 > x1
    ]
    return statistics.median(slopes) if slopes else None


def flat(name: str, unit: str, samples: Sequence[tuple[float, float]], bound: Bound) -> Row:
    """`samples`: (hours, value) in states that can be compared. What the robust slope comes to over
    the time judged, and what lies between the first and the last few, must both keep to it."""
    judged = samples[round(len(samples) * WARM_UP_RATIO) :]
    if len(judged) < 3:
        raise ValueError(f"{name}: {len(judged)} samples say nothing; soak for longer")
    hours = judged[-1][0] - judged[0][0]
    some = max(1, len(judged) // 4)
    start = statistics.median(value for _, value in judged[:some])
    end = statistics.median(value for _, value in judged[-some:])
    an_hour = slope(judged)
    most = bound.over(hours)
    grows = an_hour is not None and an_hour * hours > most
    told = f"+{bound.step:g}" + (f" and {bound.an_hour:g} an hour" if bound.an_hour else "")
    return Row(
        name,
        unit,
        start,
        end,
        max(value for _, value in samples),
        an_hour,
        told,
        "FAILED" if grows or end - start > most else "ok",
    )


def at_most(name: str, unit: str, samples: Sequence[tuple[float, float]], most: float) -> Row:
    """Never above; the slope is told, and not judged."""
    values = [value for _, value in samples]
    verdict: Verdict = "ok" if max(values) <= most else "FAILED"
    return Row(
        name, unit, values[0], values[-1], max(values), slope(samples), f"<= {most:g}", verdict
    )


@dataclass(frozen=True, slots=True)
class Watched:
    """From when until when the engine at a port was looked at, CLOCK_MONOTONIC; what its watch said
    at its end: requests that ended, such as the engine took along when it died (how many, and
    their trace ids), and records that were lost and not counted."""

    port: int
    attached_ns: int
    ended_ns: int
    requests: int
    cut_off: int
    uncounted_losses: int
    cut_off_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kill:
    """An engine's death by SIGKILL, CLOCK_MONOTONIC."""

    port: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Found:
    """What the sidecar answered when asked about a request."""

    partial: bool


@dataclass(frozen=True, slots=True)
class Books:
    """Clients' requests against the sidecar's accounts, each looked up by its trace id."""

    by_fate: dict[str, int]
    completed: int
    explained: int  # of those completed
    explained_partial: int
    before_attached: int  # completed while nobody was attached to their engine
    at_a_kill: int  # completed, told as cut off: the engine was killed before it had written so
    missing: tuple[str, ...]  # seen to end, neither accounted for nor told: must be none
    strange: tuple[str, ...]  # partial, though the sidecar was there all the time: must be none
    explained_of_all: int
    accounted: int  # as the watches said at their ends
    broken_off: int  # by the engine's death, and without an account; of these:
    broken_told: int  # the watch has said so of this very request
    broken_unseen: int  # nobody was attached
    broken_unheard: int  # no byte of an answer came: the engine may not have read it
    left_without: int  # by their clients, nobody attached, or told as cut off
    cut_off: int  # what the watches said
    cut_off_strange: tuple[str, ...]  # told, and not known to have been: must be none

    @property
    def faults(self) -> list[str]:
        said = []
        if self.missing:
            said.append(f"{len(self.missing)} requests without an account: {self.missing[0]}")
        if self.strange:
            said.append(f"{len(self.strange)} partial accounts of requests seen whole")
        if self.explained_of_all != self.accounted:
            said.append(
                f"{self.accounted} requests accounted for, {self.explained_of_all} explained"
            )
        if self.cut_off_strange:
            said.append(
                f"{len(self.cut_off_strange)} of {self.cut_off} said to be cut off were not: "
                f"{self.cut_off_strange[0]}"
            )
        return said

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "faults": self.faults}


def reconcile(
    asked: Iterable[Asked],
    answers: dict[str, Found],
    watches: Sequence[Watched],
    kills: Sequence[Kill],
    slack_ns: int,
) -> Books:
    """`slack_ns`: how exactly it is known when a watch began and ended. Of a request that began to
    be answered there must be an account, or it must be told as cut off, or no watch was there when
    it ended; and its account may be partial only where a watch began while it went on."""
    named = {trace_id for watch in watches for trace_id in watch.cut_off_ids}
    by_fate: Counter[str] = Counter()
    places: Counter[str] = Counter()
    missing: list[str] = []
    strange: list[str] = []
    cut_off = set[str]()
    for each in asked:
        by_fate[each.fate] += 1
        found = answers.get(each.trace_id)
        if found is not None:
            places["explained"] += 1
            places[f"{each.fate} explained"] += 1
            places[f"{each.fate} partial"] += found.partial
            if found.partial and not _began_meanwhile(each, watches, slack_ns):
                strange.append(each.trace_id)
        elif each.trace_id in named:
            places[f"{each.fate} told"] += 1
            if each.fate != "refused":
                cut_off.add(each.trace_id)
        elif each.fate in ("answered", "refused"):
            continue
        elif _is_unseen(each, watches, kills, slack_ns):
            places[f"{each.fate} unseen"] += 1
        elif not each.heard:
            places[f"{each.fate} unheard"] += 1
        else:
            missing.append(_told(each, watches, kills))
    said = sum(watch.cut_off for watch in watches)
    unnamed = said - sum(len(watch.cut_off_ids) for watch in watches)
    return Books(
        by_fate=dict(by_fate),
        completed=by_fate["completed"],
        explained=places["completed explained"],
        explained_partial=places["completed partial"],
        before_attached=places["completed unseen"],
        at_a_kill=places["completed told"],
        missing=tuple(missing),
        strange=tuple(strange),
        explained_of_all=places["explained"],
        accounted=sum(watch.requests for watch in watches),
        broken_off=by_fate["broken"] - places["broken explained"],
        broken_told=places["broken told"],
        broken_unseen=places["broken unseen"],
        broken_unheard=places["broken unheard"],
        left_without=places["left unseen"] + places["left told"],
        cut_off=said,
        cut_off_strange=(*sorted(named - cut_off), *["not named"] * unnamed),
    )


def _told(asked: Asked, watches: Sequence[Watched], kills: Sequence[Kill]) -> str:
    """A request, and how long after its end what happened to its engine."""
    events = [("attached", w.attached_ns) for w in watches if w.port == asked.port]
    events += [("ended", w.ended_ns) for w in watches if w.port == asked.port]
    events += [("killed", k.at_ns) for k in kills if k.port == asked.port]
    events.sort(key=lambda event: abs(event[1] - asked.end_ns))
    near = ", ".join(f"{what} {(at - asked.end_ns) / 1e9:+.3f} s" for what, at in events[:4])
    life_s = (asked.end_ns - asked.sent_ns) / 1e9
    return f"{asked.trace_id}, {life_s:.3f} s on port {asked.port}; {near}"


def _began_meanwhile(asked: Asked, watches: Sequence[Watched], slack_ns: int) -> bool:
    return any(
        watch.port == asked.port
        and asked.sent_ns <= watch.attached_ns + slack_ns
        and asked.end_ns >= watch.attached_ns - slack_ns
        for watch in watches
    )


def _is_unseen(
    asked: Asked, watches: Sequence[Watched], kills: Sequence[Kill], slack_ns: int
) -> bool:
    """No watch covers all the time in which the engine may have ended it. Of one that broke off at
    a kill it is known when that was, and the watch ended after that."""
    may_end_ns, end_ns = asked.may_end_ns, asked.end_ns + slack_ns
    if asked.fate == "broken":
        died_ns = [k.at_ns for k in kills if k.port == asked.port and k.at_ns <= asked.end_ns]
        if died_ns and max(died_ns) >= asked.sent_ns:
            may_end_ns = end_ns = max(died_ns)
    return not any(
        watch.port == asked.port
        and watch.attached_ns + slack_ns < may_end_ns
        and end_ns < watch.ended_ns
        for watch in watches
    )
