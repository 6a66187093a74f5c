"""Exponential histograms: every value in its bucket, bounded, and alike to the SDK's own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

from dsagent.agent.metrics.exponential import (
    MAX_BUCKETS,
    MAX_SCALE,
    MIN_SCALE,
    ExponentialHistogram,
    ExponentialPoint,
)

VALUES = st.lists(st.floats(0, 1e300, allow_subnormal=False), min_size=1, max_size=50)


def of(values: list[float]) -> ExponentialPoint:
    histogram = ExponentialHistogram()
    for value in values:
        histogram.observe(value)
    return histogram.point()


def bounds(point: ExponentialPoint, index: int) -> tuple[float, float]:
    """As logarithms to base 2, which are exact where the bounds themselves overflow."""
    return index * 2.0**-point.scale, (index + 1) * 2.0**-point.scale


@given(VALUES)
def test_nothing_is_lost_and_the_buckets_are_bounded(values: list[float]) -> None:
    point = of(values)
    assert point.zero_count + sum(point.counts) == len(values)
    assert len(point.counts) <= MAX_BUCKETS
    assert MIN_SCALE <= point.scale <= MAX_SCALE
    assert (point.min, point.max) == (min(values), max(values))
    if point.counts:
        assert point.counts[0] > 0
        assert point.counts[-1] > 0


@given(VALUES)
def test_every_value_lies_in_its_bucket(values: list[float]) -> None:
    point = of(values)
    expected: dict[int, int] = {}
    for value in values:
        if value > 0:
            # By search, not by the formula: the only bucket whose bounds hold it.
            log = math.log2(value)
            first = math.floor(log * 2.0**point.scale)
            near = [
                i for i in (first - 1, first) if bounds(point, i)[0] < log <= bounds(point, i)[1]
            ]
            expected[near[0]] = expected.get(near[0], 0) + 1
    found = {point.offset + k: count for k, count in enumerate(point.counts) if count}
    assert found == expected


@pytest.mark.parametrize("scale_range", [(1.0, 2.0), (1e-3, 1e3), (5e-324, 1.7e308)])
def test_the_range_decides_the_scale(scale_range: tuple[float, float]) -> None:
    low, high = scale_range
    point = of([low, high])
    doublings = math.log2(high) - math.log2(low)
    # As fine as the buckets allow, and no finer.
    assert doublings * 2.0**point.scale <= MAX_BUCKETS + 1
    assert point.scale == MAX_SCALE or doublings * 2.0 ** (point.scale + 1) > MAX_BUCKETS - 2


def test_powers_of_two_belong_below_their_bound() -> None:
    point = of([1.0, 2.0, 4.0, 1e-30, 1e30])  # wide: a low scale
    per_doubling = 2.0**point.scale
    for value in (1.0, 2.0, 4.0):
        index = math.ceil(math.log2(value) * per_doubling) - 1
        assert point.counts[index - point.offset] > 0
        assert bounds(point, index)[1] >= math.log2(value)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, 0.0])
def test_what_is_no_positive_number_counts_as_zero(value: float) -> None:
    point = of([value, 1.0])
    assert (point.zero_count, sum(point.counts)) == (1, 1)
    assert (point.min, point.max) == (0.0, 1.0)


def test_the_sdk_makes_the_same_of_it() -> None:
    values = [0.0, 0.0013, 0.02, 0.0200001, 0.5, 1.0, 1.0, 3.7, 60.0]
    reader = InMemoryMetricReader()
    view = View(
        instrument_name="*",
        aggregation=ExponentialBucketHistogramAggregation(MAX_BUCKETS, MAX_SCALE),
    )
    provider = MeterProvider(metric_readers=[reader], views=[view])
    instrument = provider.get_meter("m").create_histogram("h")
    for value in values:
        instrument.record(value)
    data = reader.get_metrics_data()
    assert data is not None
    (theirs,) = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    provider.shutdown()
    ours = of(values)
    assert ours.scale == theirs.scale  # type: ignore[union-attr]
    assert ours.zero_count == theirs.zero_count  # type: ignore[union-attr]
    assert ours.offset == theirs.positive.offset  # type: ignore[union-attr]
    assert list(ours.counts) == list(theirs.positive.bucket_counts)[: len(ours.counts)]  # type: ignore[union-attr]
