"""Why the budget burns: what the violating requests had to pay beyond the usual, by cause. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsagent.agent.attribution.account import Account, Culprit, Part
from dsagent.agent.slo.verdicts import Verdict
from dsagent.instrumentation.records import RequestOpen

KEPT_VIOLATORS = 256  # of one series
MOST_CAUSES = 3
MOST_CULPRITS = 3
MOST_EXEMPLARS = 3
LEAST_RATIO = 0.05  # a smaller share of the burnt budget is not worth naming
UNATTRIBUTED = "unattributed"
UNFINISHED = "unfinished"  # it goes on: why is known when it has ended
OWN_WORK = "own work"  # nothing was unusual: the limit is tighter than what such a request takes


@dataclass(frozen=True, slots=True)
class Violator:
    """One bad request: what it paid beyond the usual, in ns by cause; an error has no times."""

    at_ns: int
    trace_id: str
    is_kept: bool  # its trace is to be found where traces are sent
    over_ns: float
    causes: Mapping[str, float]
    culprits: tuple[tuple[str, Culprit], ...]  # with the cause


@dataclass(frozen=True, slots=True)
class Explanation:
    """Shares of the burnt budget by cause, largest first; who; and traces that show it."""

    causes: tuple[tuple[str, float], ...] = ()
    culprits: tuple[tuple[str, Culprit], ...] = ()
    exemplars: tuple[str, ...] = ()
    violators: int = 0


def violator(account: Account, verdict: Verdict, now_ns: int) -> Violator:
    """What the account of a bad request says of its being bad."""
    record = account.record
    causes: dict[str, float]
    parts: tuple[Part, ...] = ()
    if verdict.over_ns is None or record.error is not None:
        causes = {f"error {record.error or 'unknown'}": 1.0}
    else:
        parts, unattributed_ns, lengths = _parts_of(account, verdict)
        causes = {part.cause: _excess_ns(part, lengths[part.cause], account) for part in parts}
        causes[UNATTRIBUTED] = float(unattributed_ns)
        causes = {cause: ns for cause, ns in causes.items() if ns > 0}
        missing_ns = verdict.over_ns * _pieces(account, verdict) - sum(causes.values())
        if missing_ns > 0:
            causes[OWN_WORK] = missing_ns
    named = [
        (part.cause, culprit)
        for part in parts
        if causes.get(part.cause)
        for culprit in sorted(part.culprits, key=lambda each: -each.ns)[:MOST_CULPRITS]
    ]
    return Violator(
        now_ns,
        account.trace_id,
        record.sampled is not False,
        verdict.over_ns or 0.0,
        causes,
        tuple(named),
    )


def unfinished_violator(opened: RequestOpen, over_ns: float, now_ns: int) -> Violator:
    """What is known of a bad request that goes on."""
    trace_id = f"{opened.trace_id:032x}"
    causes = {UNFINISHED: over_ns}
    return Violator(now_ns, trace_id, opened.sampled is not False, over_ns, causes, ())


def _parts_of(
    account: Account, verdict: Verdict
) -> tuple[tuple[Part, ...], int, Mapping[str, float]]:
    """The parts of the time that the objective measures, its unattributed nanoseconds, and how
    much of each cause lies in it."""
    in_ttft = {part.cause: part.ns for part in account.ttft_parts}
    unattributed_ttft_ns = account.ttft_unattributed_ns or 0
    if verdict.key.objective == "ttft":
        by_cause = {part.cause: part for part in account.parts}
        parts = tuple(by_cause.get(part.cause, part) for part in account.ttft_parts)
        return parts, unattributed_ttft_ns, {cause: float(ns) for cause, ns in in_ttft.items()}
    if verdict.key.objective == "tpot":
        after = {p.cause: float(max(0, p.ns - in_ttft.get(p.cause, 0))) for p in account.parts}
        return account.parts, max(0, account.unattributed_ns - unattributed_ttft_ns), after
    return account.parts, account.unattributed_ns, {p.cause: float(p.ns) for p in account.parts}


def _excess_ns(part: Part, within_ns: float, account: Account) -> float:
    """Of the whole part's excess, what lies within the measured time: in proportion."""
    return part.excess_ns * min(1.0, within_ns / part.ns) if part.ns else 0.0


def _pieces(account: Account, verdict: Verdict) -> int:
    """Time per output token is exceeded once a token."""
    return max(1, account.record.output_tokens - 1) if verdict.key.objective == "tpot" else 1


class Violators:
    """The last ones of one series."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: deque[Violator] = deque(maxlen=KEPT_VIOLATORS)

    def add(self, each: Violator) -> None:
        self._kept.append(each)

    def forget(self, trace_id: str) -> None:
        """More is known of it now."""
        kept = [each for each in self._kept if each.trace_id != trace_id]
        self._kept = deque(kept, maxlen=KEPT_VIOLATORS)

    def explain(self, since_ns: int) -> Explanation:
        """Of those that came since then."""
        recent = [each for each in self._kept if each.at_ns >= since_ns]
        burnt: dict[str, float] = {}
        for each in recent:
            total = sum(each.causes.values())
            # Every bad request burns as much of the budget, however late it was.
            for cause, ns in each.causes.items():
                burnt[cause] = burnt.get(cause, 0.0) + ns / total
        all_burnt = sum(burnt.values())
        if all_burnt <= 0:
            return Explanation(violators=len(recent))
        shares = [
            (cause, amount / all_burnt)
            for cause, amount in sorted(burnt.items(), key=lambda each: -each[1])
        ]
        named = tuple(each for each in shares if each[1] >= LEAST_RATIO)[:MOST_CAUSES]
        causes = named or tuple(shares[:1])
        return Explanation(
            causes,
            _worst_culprits((each.culprits for each in recent), {cause for cause, _ in causes}),
            _exemplars(recent),
            len(recent),
        )


def _worst_culprits(
    of_requests: Iterable[Iterable[tuple[str, Culprit]]], causes: set[str]
) -> tuple[tuple[str, Culprit], ...]:
    summed: dict[tuple[str, str, str], tuple[str, Culprit, int]] = {}
    for culprits in of_requests:
        for cause, culprit in culprits:
            if cause in causes:
                key = (cause, culprit.kind, culprit.request_id or f"{culprit.name} {culprit.pid}")
                before_ns = summed[key][2] if key in summed else 0
                summed[key] = (cause, culprit, before_ns + culprit.ns)
    worst = sorted(summed.values(), key=lambda each: -each[2])[:MOST_CULPRITS]
    return tuple(
        (cause, Culprit(who.kind, who.name, ns, who.pid, who.request_id, who.trace_id))
        for cause, who, ns in worst
    )


def _exemplars(recent: list[Violator]) -> tuple[str, ...]:
    """The worst, those first whose traces are kept."""
    ranked = sorted(recent, key=lambda each: (not each.is_kept, -each.over_ns))
    return tuple(dict.fromkeys(each.trace_id for each in ranked))[:MOST_EXEMPLARS]
