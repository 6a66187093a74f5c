"""Scores each feature of each vector against what is usual, and adds the scores up.

One long step is no finding: the account of its requests tells it. A finding is a feature that stays
above what is usual. Therefore scores are summed, less what chance brings (CUSUM), over all settings
of a feature together; each score is bounded, so that one value alone is never enough.

While a feature is under suspicion nothing of it is learnt: an anomaly does not teach that it is
usual. Neither flat features nor absent ones nor settings that are new make a score.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dsagent.agent.anomalies.features import (
    APART,
    PART_PREFIX,
    UNATTRIBUTED,
    WHOLE,
    Kind,
    Observation,
    Setting,
)
from dsagent.agent.anomalies.reference import Reference

MAX_SETTINGS = 48  # of each kind; those not seen for longest are forgotten
MAX_FEATURES = 40  # of each setting
KEPT_VALUES = 64  # of a suspicion: their median is what the finding tells
KEPT_REQUESTS = 64
FORGOTTEN_NS = 60_000_000_000  # a suspicion that nothing renews meanwhile, for want of vectors

LEAST_SPREAD_RATIO = 0.03  # of the usual duration of the whole: what is flat has no spread
LEAST_SPREAD_NS = 50_000.0
CHANCE = 3.0  # a score that chance may bring: taken off each
MOST = 8.0  # of one score
SUSPECTED_RATIO = 0.25  # of what is enough


@dataclass(frozen=True, slots=True)
class Tuning:
    """How one kind is judged."""

    window: int  # values a reference is made of
    warm: int  # values until it is used
    every_ns: int  # once warm, a reference learns no more often, so that it spans minutes
    enough: float  # sum of scores, less chance, that is a finding
    lasts_ns: int  # and so long it must have been above 0


# So 10 steps in a row at the very least, over a second, or 3 requests.
TUNINGS: Mapping[Kind, Tuning] = {
    "step": Tuning(256, 64, 250_000_000, 50.0, 1_000_000_000),
    "request": Tuning(128, 24, 0, 15.0, 0),
}


@dataclass(slots=True)
class Suspicion:
    """What speaks for one feature having moved."""

    sum: float = 0.0
    since_ns: int = 0
    last_ns: int = 0  # when it last grew
    # each with what was usual for it, and for the whole that it is part of
    values: deque[tuple[float, float, float]] = field(
        default_factory=lambda: deque(maxlen=KEPT_VALUES)
    )
    seen: int = 0  # vectors above what is usual
    most: float = 0.0  # the largest score
    # by request key: the largest score of a vector in which it took part
    requests: dict[int, float] = field(default_factory=dict)

    @property
    def value_ns(self) -> float:
        return statistics.median([value for value, _, _ in self.values])

    @property
    def usual_ns(self) -> float:
        return statistics.median([usual for _, usual, _ in self.values])

    def excess_ns(self) -> float:
        """By how much the values are above what was usual for each, the median one."""
        return statistics.median([value - usual for value, usual, _ in self.values])

    def excess_ratio(self) -> float:
        """The same, of the usual duration of the whole."""
        ratios = [(value - usual) / max(whole, 1.0) for value, usual, whole in self.values]
        return statistics.median(ratios)


class Detector:
    """Of one kind. Bounded: references, suspicions and what they keep."""

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.tuning = TUNINGS[kind]
        self._settings: OrderedDict[Setting, _References] = OrderedDict()
        self.suspicions: dict[str, Suspicion] = {}

    def add(self, observed: Observation) -> None:
        references = self._references(observed.setting)
        references.seen += 1
        whole_ns = references.usual_ns(WHOLE[self.kind])
        for feature, value_ns in references.values(observed.values):
            reference = references.by_feature.get(feature)
            if reference is None:
                reference = references.new(feature, self.tuning)
                if reference is None:
                    continue
            if reference.learnt >= self.tuning.warm:
                self._judge(feature, value_ns, reference, whole_ns, observed)
            if self._may_learn(feature, reference, observed.mono_ns):
                reference.learn(value_ns, observed.mono_ns)

    def expire(self, now_ns: int) -> None:
        """A suspicion keeps its feature from being learnt: it must not stay for want of vectors
        that are like those it came from."""
        for feature, suspicion in list(self.suspicions.items()):
            if suspicion.last_ns < now_ns - FORGOTTEN_NS:
                del self.suspicions[feature]

    def moved(self) -> Iterator[tuple[str, Suspicion]]:
        """The features for which enough speaks."""
        tuning = self.tuning
        for feature, suspicion in self.suspicions.items():
            lasted_ns = suspicion.last_ns - suspicion.since_ns
            if suspicion.sum >= tuning.enough and lasted_ns >= tuning.lasts_ns:
                yield feature, suspicion

    def is_suspected(self, features: Iterable[str]) -> bool:
        """Whether any of them is under more than passing suspicion: what keeps it from being
        learnt."""
        return any(
            suspicion.sum >= SUSPECTED_RATIO * self.tuning.enough
            for suspicion in map(self.suspicions.get, features)
            if suspicion is not None
        )

    def forget(self) -> None:
        """What has lasted so long is usual: learns everything anew."""
        self._settings.clear()
        self.suspicions.clear()

    def watched(self) -> frozenset[str]:
        """The features that are compared in some setting."""
        return frozenset(
            feature
            for references in self._settings.values()
            for feature, reference in references.by_feature.items()
            if reference.learnt >= self.tuning.warm
        )

    def _references(self, setting: Setting) -> _References:
        references = self._settings.get(setting)
        if references is None:
            references = self._settings[setting] = _References()
            if len(self._settings) > MAX_SETTINGS:
                self._settings.popitem(last=False)
        else:
            self._settings.move_to_end(setting)
        return references

    def _judge(
        self,
        feature: str,
        value_ns: float,
        reference: Reference,
        whole_ns: float,
        observed: Observation,
    ) -> None:
        if feature in APART:
            whole_ns = reference.usual_ns
        spread_ns = max(reference.spread_ns, LEAST_SPREAD_RATIO * whole_ns, LEAST_SPREAD_NS)
        score = (value_ns - reference.usual_ns) / spread_ns
        suspicion = self.suspicions.get(feature)
        if score <= CHANCE:
            if suspicion is not None:
                suspicion.sum += max(score, 0.0) - CHANCE
                if suspicion.sum <= 0.0:
                    del self.suspicions[feature]
            return
        if suspicion is None:
            suspicion = self.suspicions[feature] = Suspicion(since_ns=observed.mono_ns)
        # Not much more than is enough: the end of it is to be seen soon.
        suspicion.sum = min(suspicion.sum + min(score, MOST) - CHANCE, 1.5 * self.tuning.enough)
        suspicion.last_ns = observed.mono_ns
        suspicion.values.append((value_ns, reference.usual_ns, whole_ns))
        suspicion.seen += 1
        suspicion.most = max(suspicion.most, score)
        for key in observed.request_keys:
            if key in suspicion.requests or len(suspicion.requests) < KEPT_REQUESTS:
                suspicion.requests[key] = max(suspicion.requests.get(key, 0.0), score)

    def _may_learn(self, feature: str, reference: Reference, now_ns: int) -> bool:
        is_warm = reference.learnt >= self.tuning.warm
        is_due = not is_warm or now_ns - reference.learnt_ns >= self.tuning.every_ns
        return is_due and not self.is_suspected((feature,))


class _References:
    """Of one setting, by feature."""

    __slots__ = ("by_feature", "seen")

    def __init__(self) -> None:
        self.by_feature: dict[str, Reference] = {}
        self.seen = 0

    def usual_ns(self, feature: str) -> float:
        reference = self.by_feature.get(feature)
        return 0.0 if reference is None else reference.usual_ns

    def values(self, told: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """With the parts that this vector does not have: nothing of its time went there."""
        yield from told.items()
        if UNATTRIBUTED in told:
            for feature in self.by_feature:
                if feature not in told and feature.startswith(PART_PREFIX):
                    yield feature, 0.0

    def new(self, feature: str, tuning: Tuning) -> Reference | None:
        """A part that comes for the first time was 0 in all vectors before."""
        if len(self.by_feature) >= MAX_FEATURES:
            return None
        reference = self.by_feature[feature] = Reference(tuning.window)
        if feature.startswith(PART_PREFIX):
            for _ in range(min(self.seen - 1, tuning.window)):
                reference.learn(0.0, 0)
        return reference
