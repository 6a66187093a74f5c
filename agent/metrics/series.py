"""Numbers and histograms by metric and labels, bounded whatever they are fed.

`Store` is written by aggregate.py; the immutable families it gives back are
what OpenMetrics text (sinks/openmetrics.py) and OTLP (sinks/otlp_encode.py)
are made of.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from dsagent.agent.metrics.cardinality import MAX_SERIES, series_of
from dsagent.agent.metrics.catalog import CATALOGUE, MAX_LABEL_VALUES, OTHER, SERIES_OVERFLOWED
from dsagent.agent.metrics.exponential import ExponentialHistogram, ExponentialPoint
from dsagent.agent.metrics.metric import Metric

Labels = tuple[tuple[str, str], ...]  # attribute and value, in the catalogue's order

MAX_VALUE_CHARS = 128


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation of a kept trace."""

    value: float
    unix_ns: int
    trace_id: int
    span_id: int


@dataclass(frozen=True, slots=True)
class NumberPoint:
    labels: Labels
    value: float


@dataclass(frozen=True, slots=True)
class HistogramPoint:
    """`counts` has one entry more than `bounds` and is not cumulative; `exemplars` goes with it."""

    labels: Labels
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    exemplars: tuple[Exemplar | None, ...]
    exponential: ExponentialPoint | None = None  # the same observations, if asked for


@dataclass(frozen=True, slots=True)
class Family:
    """One metric and its points at one moment."""

    metric: Metric
    numbers: tuple[NumberPoint, ...] = ()
    histograms: tuple[HistogramPoint, ...] = ()


@dataclass(slots=True)
class _Histogram:
    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    exemplars: list[Exemplar | None] = field(init=False)
    sum: float = 0.0
    exponential: ExponentialHistogram | None = None

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)
        self.exemplars = [None] * (len(self.bounds) + 1)

    def observe(self, value: float, exemplar: Exemplar | None) -> None:
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if exemplar is not None:
            self.exemplars[bucket] = exemplar
        if self.exponential is not None:
            self.exponential.observe(value)

    def point(self, labels: Labels) -> HistogramPoint:
        exponential = None if self.exponential is None else self.exponential.point()
        return HistogramPoint(
            labels, self.bounds, tuple(self.counts), self.sum, tuple(self.exemplars), exponential
        )


class Store:
    """A label of a metric holds at most MAX_LABEL_VALUES values; further ones become `~other`.
    In all there are at most cardinality.MAX_SERIES series, and one `~other` for each metric.
    Labels that the catalogue does not list for the metric are a KeyError."""

    def __init__(
        self,
        extra_bounds: Mapping[str, tuple[float, ...]] | None = None,
        *,
        exponential: bool = False,
    ) -> None:
        """`extra_bounds`: further bounds of histograms, by the metric's name; `exponential`: keep
        exponential histograms too."""
        self._exponential = exponential
        self._series = 0  # in use, of cardinality.MAX_SERIES
        extra = extra_bounds or {}
        self._numbers: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {}
        self._values: dict[tuple[str, str], set[str]] = {}
        self._bounds = {
            metric.name: tuple(sorted({*metric.bounds, *extra.get(metric.name, ())}))
            for metric in CATALOGUE
            if metric.kind == "histogram"
        }

    def increase(self, metric: Metric, by: float, labels: Mapping[str, str]) -> None:
        """Adds to a counter."""
        points = self._numbers.setdefault(metric.name, {})
        key = self._placed(metric, points, labels)
        points[key] = points.get(key, 0.0) + by

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Sets a gauge, or a counter that somebody else adds up; left out where the budget of
        series is used up: there is no sum of two."""
        points = self._numbers.setdefault(metric.name, {})
        key = self._key(metric, labels)
        if key in points or self._fits(metric):
            points[key] = value

    def clear(self, metric: Metric) -> None:
        """Forgets the values of a metric that is about to be set anew."""
        self._series -= len(self._numbers.pop(metric.name, ()))

    def observe(
        self,
        metric: Metric,
        value: float,
        labels: Mapping[str, str],
        exemplar: Exemplar | None = None,
    ) -> None:
        """Adds one observation to a histogram; a bucket shows its newest exemplar."""
        points = self._histograms.setdefault(metric.name, {})
        key = self._placed(metric, points, labels)
        histogram = points.get(key)
        if histogram is None:
            exponential = ExponentialHistogram() if self._exponential else None
            bounds = self._bounds[metric.name]
            histogram = points[key] = _Histogram(bounds, exponential=exponential)
        histogram.observe(value, exemplar)

    def _placed(
        self, metric: Metric, points: Mapping[Labels, object], labels: Mapping[str, str]
    ) -> Labels:
        """Where an update goes: `~other` in every label where its place would be a new series
        beyond the budget."""
        key = self._key(metric, labels)
        if key in points or self._fits(metric):
            return key
        return tuple((name, OTHER) for name, _ in key)

    def _fits(self, metric: Metric) -> bool:
        """Takes the room for one more point of the metric, or counts that there is none."""
        bounds = self._bounds.get(metric.name)
        more = series_of(metric, None if bounds is None else len(bounds))
        if self._series + more > MAX_SERIES:
            overflowed = self._numbers.setdefault(SERIES_OVERFLOWED.name, {})
            overflowed[()] = overflowed.get((), 0.0) + 1
            return False
        self._series += more
        return True

    def collect(self) -> list[Family]:
        """What there is now, in the catalogue's order; metrics without a value are left out."""
        families = []
        for metric in CATALOGUE:
            numbers = self._numbers.get(metric.name, {})
            histograms = self._histograms.get(metric.name, {})
            if numbers or histograms:
                families.append(
                    Family(
                        metric,
                        tuple(NumberPoint(labels, value) for labels, value in numbers.items()),
                        tuple(h.point(labels) for labels, h in histograms.items()),
                    )
                )
        return families

    def _key(self, metric: Metric, labels: Mapping[str, str]) -> Labels:
        unknown = labels.keys() - set(metric.attributes)
        if unknown:
            raise KeyError(f"{metric.name} has no attribute {min(unknown)}")
        return tuple(
            (name, self._capped(metric, name, labels[name]))
            for name in metric.attributes
            if name in labels
        )

    def _capped(self, metric: Metric, name: str, value: str) -> str:
        value = printable(value)
        values = self._values.setdefault((metric.name, name), set())
        if value not in values:
            if len(values) >= MAX_LABEL_VALUES:
                return OTHER
            values.add(value)
        return value


def printable(text: str) -> str:
    """Text from another process made fit to be shown: bounded, control characters escaped."""
    text = text[:MAX_VALUE_CHARS]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
