"""Groups the features that moved into episodes: one finding when it begins, one when it is over.

While an episode lasts, a feature that moves too belongs to it. Only one that outgrows the one
named, in nanoseconds, is told as a finding of its own, and no more often than twice a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from dsagent.agent.anomalies.detector import Detector, Suspicion
from dsagent.agent.anomalies.features import OVERLAPPING, UNIT, Kind
from dsagent.agent.anomalies.finding import Finding, State

WORTH_RATIO = 0.1  # of the usual duration of the whole: what moved by less is nobody's concern
OUTGROWN_RATIO = 2.0  # so much more than the feature named
OUTGROWN_NS = 30_000_000_000  # since the last finding
REST_NS = 10_000_000_000  # likewise, until another episode begins
QUIET_NS = 5_000_000_000  # without anything that moved, an episode is over
USUAL_NS = 600_000_000_000  # what has lasted so long is learnt as usual
MAX_TRACE_IDS = 16
MAX_ALSO = 8


class Episodes:
    """Of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.detector = Detector(kind)
        self.open: Finding | None = None  # as it was told
        self._told_ns = -REST_NS
        self._quiet_ns: int | None = None  # since when nothing has moved

    def look(self, now_ns: int, trace_ids: Mapping[int, int]) -> list[Finding]:
        """What is to be told now. `trace_ids`: by request key, as far as known."""
        self.detector.expire(now_ns)
        moved = dict(self.detector.moved())
        feature = self._leading(moved)
        if self.open is None:
            if feature is None or now_ns - self._told_ns < REST_NS:
                return []
            return [self._tell("begun", feature, moved, now_ns, trace_ids)]
        return self._go_on(feature, moved, now_ns, trace_ids)

    def _go_on(
        self,
        feature: str | None,
        moved: Mapping[str, Suspicion],
        now_ns: int,
        trace_ids: Mapping[int, int],
    ) -> list[Finding]:
        told = self.open
        assert told is not None
        if now_ns - told.begun_ns >= USUAL_NS:
            found = self._close("usual now", told, now_ns)
            self.detector.forget()
            return [found]
        if feature is None and not self.detector.is_suspected((told.feature, *told.also)):
            self._quiet_ns = self._quiet_ns or now_ns
            if now_ns - self._quiet_ns >= QUIET_NS:
                return [self._close("ended", told, now_ns)]
            return []
        self._quiet_ns = None
        if feature is None or feature == told.feature or now_ns - self._told_ns < OUTGROWN_NS:
            return []
        if moved[feature].excess_ns() < OUTGROWN_RATIO * (told.value - told.usual):
            return []
        return [self._tell("outgrew", feature, moved, now_ns, trace_ids)]

    def _leading(self, moved: Mapping[str, Suspicion]) -> str | None:
        """The feature to name: the part that grew by most, if it makes up half of what the whole
        grew by; else the whole. None where nothing grew by an amount that counts."""
        excess_ns = {
            feature: suspicion.excess_ns()
            for feature, suspicion in moved.items()
            if suspicion.excess_ratio() >= WORTH_RATIO
        }
        if not excess_ns:
            return None
        parts = {feature: ns for feature, ns in excess_ns.items() if feature not in OVERLAPPING}
        largest = max(excess_ns, key=lambda feature: excess_ns[feature])
        if not parts:
            return largest
        part = max(parts, key=lambda feature: parts[feature])
        return part if parts[part] >= excess_ns[largest] / 2 else largest

    def _tell(
        self,
        state: State,
        feature: str,
        moved: Mapping[str, Suspicion],
        now_ns: int,
        trace_ids: Mapping[int, int],
    ) -> Finding:
        suspicion = moved[feature]
        others = {
            name: other
            for name, other in self.detector.suspicions.items()
            if name != feature
            and other.seen >= suspicion.seen / 2
            and other.excess_ratio() >= WORTH_RATIO
        }
        also = sorted(others, key=lambda name: -others[name].excess_ns())
        self.open = Finding(
            kind=self.detector.kind,
            state=state,
            feature=feature,
            value=suspicion.value_ns,
            usual=suspicion.usual_ns,
            unit=UNIT,
            score=suspicion.most,
            seen=suspicion.seen,
            begun_ns=suspicion.since_ns,
            now_ns=now_ns,
            also=tuple(also[:MAX_ALSO]),
            trace_ids=_known(suspicion, trace_ids),
        )
        self._told_ns, self._quiet_ns = now_ns, None
        return self.open

    def _close(self, state: State, told: Finding, now_ns: int) -> Finding:
        self.open, self._told_ns = None, now_ns
        return replace(told, state=state, now_ns=now_ns)


def _known(suspicion: Suspicion, trace_ids: Mapping[int, int]) -> tuple[str, ...]:
    """The trace that moved most first."""
    keys = sorted(suspicion.requests, key=lambda key: -suspicion.requests[key])
    known = (trace_ids[key] for key in keys if key in trace_ids)
    return tuple(f"{trace_id:032x}" for trace_id in islice(known, MAX_TRACE_IDS))
