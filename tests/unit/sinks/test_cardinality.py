"""The budget of time series: estimated, never exceeded, and what may be no label."""

from __future__ import annotations

import re

import pytest

from dsagent.agent.attribution.account import CAUSES
from dsagent.agent.metrics import cardinality, catalog, series
from dsagent.agent.metrics.cardinality import MAX_SERIES, USUAL_VALUES, estimate, series_of
from dsagent.agent.metrics.catalog import CATALOGUE, OTHER
from dsagent.agent.metrics.series import Store

# What grows without end: processes, requests, traces, functions of the kernel or the GPU.
NEVER_LABELS = re.compile(
    r"(^|[._])(pid|tid|thread_id|request_id|trace_id|span_id|session|user|url|path|kernel|function"
    r"|symbol|address|step_id|culprit|request\.id)($|[._])"
)


def shown(store: Store) -> int:
    return sum(
        len(family.numbers) + sum(len(point.counts) + 2 for point in family.histograms)
        for family in store.collect()
    )


def test_no_label_is_something_that_grows_without_end() -> None:
    for metric in CATALOGUE:
        for label in metric.attributes:
            assert not NEVER_LABELS.search(label), f"{metric.name} has the label {label}"


@pytest.mark.parametrize(
    "label", ["pid", "process.pid", "dsagent.request.id", "kernel", "trace_id"]
)
def test_the_rule_finds_such_labels(label: str) -> None:
    assert NEVER_LABELS.search(label)


def test_every_label_of_ours_has_a_usual_number_of_values() -> None:
    ours = [metric for metric in CATALOGUE if metric not in catalog.ENGINE_METRICS]
    served = {label for metric in catalog.SERVED_METRICS for label in metric.attributes}
    labels = {label for metric in ours for label in metric.attributes}
    assert labels - served <= USUAL_VALUES.keys()


def test_the_estimate_grows_with_what_there_is() -> None:
    plain = estimate(0, has_slo=False)
    assert 100 < plain < estimate(8, has_slo=False) < MAX_SERIES
    assert plain < estimate(0, has_slo=True)


def test_beyond_the_budget_there_is_one_series_for_all_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(series, "MAX_SERIES", 100)
    store = Store()
    for model in range(50):
        labels = {catalog.MODEL: f"m{model}", "cause": "x", "how": "measured"}
        for _ in range(2):
            store.observe(catalog.TIME_TO_FIRST_TOKEN, 0.1, {catalog.MODEL: f"m{model}"})
            store.increase(catalog.REQUEST_CAUSE, 1.0, labels)
    overflow = series_of(catalog.TIME_TO_FIRST_TOKEN) + 2  # its own ~other, and the counter
    assert shown(store) <= 100 + overflow
    families = {family.metric: family for family in store.collect()}
    ttft = families[catalog.TIME_TO_FIRST_TOKEN].histograms
    assert sum(sum(point.counts) for point in ttft) == 100  # nothing is lost
    assert ttft[-1].labels == ((catalog.MODEL, OTHER),)
    assert sum(p.value for p in families[catalog.REQUEST_CAUSE].numbers) == 100
    (overflowed,) = families[catalog.SERIES_OVERFLOWED].numbers
    assert overflowed.value > 0


def test_a_gauge_beyond_the_budget_is_left_out_and_room_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(series, "MAX_SERIES", 2)
    store = Store()
    for _ in range(3):
        store.clear(catalog.SOURCE_LAG)
        for source in ("a", "b", "c"):
            store.set(catalog.SOURCE_LAG, 1.0, {"source": source})
        families = {family.metric: family.numbers for family in store.collect()}
        assert [p.labels[0][1] for p in families[catalog.SOURCE_LAG]] == ["a", "b"]
    assert families[catalog.SERIES_OVERFLOWED][0].value == 3


def test_the_budget_holds_what_a_busy_server_shows() -> None:
    """Eight models, every cause in every way, limits, eight GPUs: still far below."""
    store = Store()
    for model in range(8):
        for cause in CAUSES:
            for how in ("measured", "modelled", "assumed"):
                labels = {catalog.MODEL: f"m{model}", "cause": cause, "how": how}
                store.increase(catalog.REQUEST_CAUSE, 1.0, labels)
                store.increase(catalog.TTFT_CAUSE, 1.0, labels)
    assert shown(store) < cardinality.MAX_SERIES / 4
