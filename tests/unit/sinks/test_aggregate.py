"""Metrics add up, stay bounded, and hide what must not be counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import made
import pytest
from made import MS, S, account, batch, series_names, step

from dsagent.agent.facts import Event, Sample, SourceStatus
from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.aggregate import SAMPLE_LIFE_NS, Aggregate
from dsagent.agent.metrics.catalog import CATALOGUE, MAX_LABEL_VALUES, OTHER
from dsagent.agent.metrics.metric import Metric
from dsagent.agent.metrics.series import Family, HistogramPoint, Store, printable
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.slo import Limit, Limits


def aggregate(limits: Limits | None = None, sampler: Sampler | None = None) -> Aggregate:
    return Aggregate(limits or Limits(), sampler or Sampler(rate=0.0), {})


def family(made_of: Aggregate, metric: Metric) -> Family | None:
    return next((f for f in made_of.collect() if f.metric is metric), None)


def values(made_of: Aggregate, metric: Metric) -> dict[str, float]:
    """By the labels' values joined with commas."""
    found = family(made_of, metric)
    return (
        {} if found is None else {",".join(v for _, v in p.labels): p.value for p in found.numbers}
    )


def histogram(made_of: Aggregate, metric: Metric) -> HistogramPoint:
    found = family(made_of, metric)
    assert found is not None
    (point,) = found.histograms
    return point


def test_causes_equal_the_duration_of_the_requests() -> None:
    state = aggregate()
    state.add(batch(accounts=tuple(account(f"r{i}") for i in range(7))))
    causes = values(state, catalog.REQUEST_CAUSE)
    assert causes == {
        "tiny-llama,cpu.runqueue,measured": pytest.approx(3.5),
        "tiny-llama,decode.compute,modelled": pytest.approx(2.8),
        "tiny-llama,unattributed": pytest.approx(0.7),
    }
    assert sum(causes.values()) == pytest.approx(histogram(state, catalog.REQUEST_DURATION).sum)
    ttft = values(state, catalog.TTFT_CAUSE)
    assert sum(ttft.values()) == pytest.approx(histogram(state, catalog.TIME_TO_FIRST_TOKEN).sum)


def test_partial_requests_are_only_counted() -> None:
    state = aggregate()
    state.add(batch(accounts=(account(partial=True),)))
    assert values(state, catalog.REQUESTS) == {"tiny-llama,length,true": 1}
    assert family(state, catalog.REQUEST_CAUSE) is None
    assert family(state, catalog.REQUEST_DURATION) is None


def test_an_engine_that_exports_itself_gets_no_second_set() -> None:
    state = aggregate()
    state.add(batch(accounts=(account(self_exported=True),)))
    names = {f.metric.name for f in state.collect()}
    assert not any(name.startswith("gen_ai.") for name in names)
    assert catalog.REQUEST_CAUSE.name in names


def test_absent_times_are_not_observed() -> None:
    state = aggregate()
    refused = account(
        first_scheduled_ns=None,
        first_token_ns=None,
        first_sent_ns=None,
        prompt_tokens=None,
        output_tokens=0,
        finish_reason=None,
        error="invalid_request",
    )
    state.add(batch(accounts=(refused,)))
    names = {f.metric.name for f in state.collect()}
    assert catalog.TIME_TO_FIRST_TOKEN.name not in names
    assert catalog.TIME_PER_OUTPUT_TOKEN.name not in names
    assert catalog.TOKEN_USAGE.name not in names
    assert ("error.type", "invalid_request") in histogram(state, catalog.REQUEST_DURATION).labels


@pytest.mark.parametrize("changes", [{"output_tokens": 1}, {"first_sent_ns": 2001 * S}])
def test_one_token_or_one_piece_has_no_time_per_token(changes: dict[str, Any]) -> None:
    state = aggregate()
    state.add(batch(accounts=(account(**changes),)))
    assert family(state, catalog.TIME_PER_OUTPUT_TOKEN) is None


def test_limits_become_bounds() -> None:
    state = aggregate(Limits((Limit("*", ttft_ns=450 * MS, tpot_ns=15 * MS, e2e_ns=3 * S),)))
    state.add(batch(accounts=(account(),)))
    assert 0.45 in histogram(state, catalog.TIME_TO_FIRST_TOKEN).bounds
    assert 0.015 in histogram(state, catalog.TIME_PER_OUTPUT_TOKEN).bounds
    assert 3.0 in histogram(state, catalog.REQUEST_DURATION).bounds


def test_exemplars_are_of_kept_traces_only_and_lie_in_their_bucket() -> None:
    state = aggregate()
    state.add(batch(accounts=(account("dropped", sampled=False), account("kept", sampled=True))))
    point = histogram(state, catalog.TIME_TO_FIRST_TOKEN)
    assert point.counts[point.bounds.index(0.5)] == 2
    (exemplar,) = [e for e in point.exemplars if e is not None]
    assert exemplar == point.exemplars[point.bounds.index(0.5)]
    assert exemplar.trace_id == made.record("kept").trace_id
    assert exemplar.unix_ns == made.ANCHOR.unix(made.record("kept").sent_ns)


def test_steps() -> None:
    state = aggregate()
    steps = (
        step(1, ("a", "b"), prefill_tokens=30, decode_tokens=1),
        step(2, ("a",), waiting=7, start_ns=2051 * S, preempted=3),
    )
    state.add(batch(steps=steps))
    found = family(state, catalog.STEP_DURATION)
    assert found is not None
    assert {p.labels[0][1]: sum(p.counts) for p in found.histograms} == {"mixed": 1, "decode": 1}
    assert values(state, catalog.STEP_TOKENS) == {"prefill": 30, "decode": 2}
    assert sum(values(state, catalog.STEP_PART).values()) == pytest.approx(0.04)
    assert values(state, catalog.REQUESTS_WAITING) == {"": 7}
    assert values(state, catalog.PREEMPTIONS) == {"": 3}


def test_what_an_engine_does_not_tell_of_its_steps_is_absent() -> None:
    state = aggregate()
    told_nothing = replace(
        step(1, ("a",)),
        schedule_ns=0,
        prepare_ns=0,
        sample_ns=0,
        kv_blocks_used=0,
        kv_blocks_total=0,
    )
    state.add(batch(steps=(told_nothing,)))
    shown = values(state, catalog.STEP_PART)
    assert not any(part in label for label in shown for part in ("schedule", "prepare", "sample"))
    assert family(state, catalog.KV_BLOCKS_USED) is family(state, catalog.KV_BLOCKS_LIMIT) is None


def test_clients_cannot_fill_the_labels_with_models_that_are_not_served() -> None:
    state = aggregate()
    for i in range(3 * MAX_LABEL_VALUES):
        refused = account(f"r{i}", model=f"made-up-{i}", first_scheduled_ns=None, error="not_found")
        state.add(batch(accounts=(refused,)))
    state.add(batch(accounts=(account("real"),)))
    assert set(values(state, catalog.REQUESTS)) == {
        f"{OTHER},not_found,false",
        "tiny-llama,length,false",
    }


def test_labels_are_capped_and_harmless() -> None:
    store = Store()
    for i in range(3 * MAX_LABEL_VALUES):
        store.increase(catalog.EVENTS, 1, {"event": f"event {i}"})
    (found,) = store.collect()
    by_value = {p.labels[0][1]: p.value for p in found.numbers}
    assert len(by_value) == MAX_LABEL_VALUES + 1
    assert by_value[OTHER] == 2 * MAX_LABEL_VALUES
    assert printable("a\nb\x1b[31m" + "x" * 999) == "a\\x0ab\\x1b[31m" + "x" * 120
    with pytest.raises(KeyError, match="no attribute pid"):
        store.increase(catalog.EVENTS, 1, {"pid": "1"})


def test_samples_expire_and_unknown_ones_are_counted() -> None:
    state = aggregate()
    good = Sample("hw.power", 71.5, 2100 * S, {"hw.id": "GPU-1"})
    state.add(batch(samples=(good, Sample("hw.power", 1.0, 0, {"pid": "3"}), Sample("x", 1.0, 0))))
    (power,) = [f for f in state.collect() if f.metric.name == "hw.power"]
    assert power.numbers[0].value == 71.5
    assert values(state, catalog.SAMPLES_UNKNOWN) == {"": 2}
    state.add(batch(now_ns=2100 * S + SAMPLE_LIFE_NS + 1))
    assert not [f for f in state.collect() if f.metric.name == "hw.power"]


def test_sources_and_events() -> None:
    state = aggregate()
    status = SourceStatus("kernel", "lagging", "slow", dropped=3, lag_ns=2 * S, cost_ns=S)
    state.add(batch(sources=(status,), events=(Event("stall", 1, "x"), Event("stall", 2, "y"))))
    state.add(batch(sources=(status,), uncounted_losses=4))
    assert values(state, catalog.SOURCE_STATE) == {
        "kernel,ok": 0,
        "kernel,unavailable": 0,
        "kernel,lagging": 1,
        "kernel,failed": 0,
    }
    assert values(state, catalog.SOURCE_DROPPED) == {"kernel": 3}
    assert values(state, catalog.EVENTS) == {"stall": 2}
    assert values(state, catalog.UNCOUNTED_LOSSES) == {"": 4}


def test_no_metric_has_a_label_without_bound() -> None:
    forbidden = {"pid", "process.pid", "tid", "request_id", "trace_id", "kernel", "kernel.name"}
    for metric in CATALOGUE:
        assert not forbidden & set(metric.attributes), metric.name


def test_names_are_unique_and_well_formed() -> None:
    names = [name for metric in CATALOGUE for name in series_names(metric)]
    assert len(names) == len(set(names))
    assert catalog.TIME_TO_FIRST_TOKEN.prometheus == "gen_ai_server_time_to_first_token_seconds"
    assert catalog.REQUEST_CAUSE.prometheus == "dsagent_request_cause_seconds_total"
    for metric in CATALOGUE:
        assert metric.description.endswith("."), metric.name
        assert list(metric.bounds) == sorted(set(metric.bounds)), metric.name
        assert bool(metric.bounds) == (metric.kind == "histogram"), metric.name
