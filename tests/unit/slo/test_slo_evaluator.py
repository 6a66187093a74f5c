"""The evaluator in simulated time: each state, each change, and nothing for nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made import MS, S
from slo_watch import SEES, SEES_NOT, Watch, request

from dsagent.agent.metrics.catalog import CATALOGUE
from dsagent.agent.metrics.series import Store
from dsagent.agent.metrics.slo_metrics import SloFigures
from dsagent.agent.slo.evaluator import RETELL_NS, Evaluator
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Limit, Limits

PAGE = ("firing", "burning", "page")


@pytest.mark.parametrize("slower", [1, 3])
@pytest.mark.parametrize("objective_ratio", [0.95, 0.99, 0.999])
def test_a_violation_is_told_within_18_seconds_after_an_hour_of_health(
    objective_ratio: float, slower: int
) -> None:
    """Five requests a second, then as many or fewer, all of them bad."""
    watch = Watch(objective_ratio=objective_ratio)
    watch.run(3600, n=5)
    assert watch.told() == []
    assert watch.states() == ["ok"]
    began_ns = watch.now_ns
    while not watch.alerts:
        watch.run(0.2 * slower, every_s=0.2 * slower, bad=True)
        assert watch.now_ns - began_ns <= 18 * S
    (alert,) = watch.alerts
    assert alert.labels == {
        "slo": "*",
        "objective": "ttft",
        "model": "tiny-llama",
        "severity": "page",
    }
    assert watch.states() == ["page"]


def test_the_alert_names_causes_culprits_and_traces(watch: Watch) -> None:
    watch.run(60)
    watch.run(20, bad=True)
    alert = watch.alerts[0]
    # Beyond the usual: 600 ms of interference and 100 ms that nothing explains.
    assert [cause for cause, _ in alert.explanation.causes] == [
        "batch.prefill_interference",
        "unattributed",
    ]
    assert alert.explanation.causes[0][1] == pytest.approx(6 / 7)
    assert alert.explanation.culprits[0][1].request_id == "long-one"
    assert alert.explanation.exemplars == (request().trace_id,)
    assert alert.summary.startswith("time to first token burning ")
    assert alert.summary.endswith(
        "×: 86 % batch.prefill_interference, 14 % unattributed; most of all by request long-one"
    )


def test_recovered(watch: Watch) -> None:
    watch.run(600)
    watch.run(30, bad=True)
    assert PAGE in watch.told()
    watch.run(3600)
    assert ("resolved", "recovered", "page") in watch.told()
    watch.run(8 * 3600, every_s=10)
    assert watch.states() == ["ok"]


def test_gone_is_not_recovered(watch: Watch) -> None:
    watch.run(120)
    watch.run(30, bad=True)
    watch.told()
    watch.run(4 * 3600, every_s=10, n=0)
    told = watch.told()
    assert ("firing", "not enough data", "page") in told
    assert all(status == "firing" for status, _, _ in told)
    assert watch.states() == ["not_enough_data"]
    watch.run(3600)  # requests again, and good ones
    assert ("resolved", "recovered", "page") in watch.told()


def test_out_of_no_data_into_burning_again(watch: Watch) -> None:
    watch.run(120)
    watch.run(30, bad=True)
    watch.run(20 * 60, n=0)
    assert watch.told()[-1] == ("firing", "not enough data", "page")
    watch.run(30, bad=True)
    assert PAGE in watch.told()


def test_one_error_never_pages_nor_do_few_requests() -> None:
    for objective_ratio in (0.99, 0.999, 1.0):
        watch = Watch(objective_ratio=objective_ratio)
        watch.run(3600, every_s=20)
        watch.run(1, bad=True)
        watch.run(7200, every_s=20)
        assert watch.told() == []
        few = Watch(objective_ratio=objective_ratio)
        few.run(9, bad=True)
        few.run(3600, n=0)
        assert few.told() == []
        assert few.states() == ["not_enough_data"]


def test_an_objective_of_100_has_no_burn_rate_and_fires_all_the_same() -> None:
    watch = Watch(objective_ratio=1.0)
    watch.run(60)
    watch.run(5, bad=True)
    assert PAGE in watch.told()
    (series,) = watch.evaluator.series.values()
    assert series.budget_ratio == 0
    store = Store()
    SloFigures(watch.evaluator).show(store)
    values = [p.value for family in store.collect() for p in family.numbers]
    assert all(math.isfinite(value) for value in values)
    assert "dsagent.slo.burn_rate" not in {family.metric.name for family in store.collect()}


def test_blind_is_told_and_nothing_is_resolved_by_it(watch: Watch) -> None:
    watch.run(120)
    watch.run(30, bad=True)
    watch.told()
    watch.sources = SEES_NOT
    watch.run(1, n=0)
    watch.run(3 * 3600, every_s=10, n=0)
    assert watch.told() == [("firing", "blind", "page")]
    assert watch.evaluator.is_blind
    watch.sources = SEES
    watch.run(6, n=0)
    assert watch.told() == [("resolved", "recovered", "page")]
    watch.run(3600)
    assert ("resolved", "recovered", "page") in watch.told()


def test_a_blink_is_not_blindness(watch: Watch) -> None:
    watch.sources = SEES_NOT
    watch.run(4, n=0)
    watch.sources = SEES
    watch.run(1)
    watch.sources = SEES_NOT
    watch.run(4, n=0)
    assert watch.told() == []


def test_at_the_end_what_burns_is_out_of_sight(watch: Watch) -> None:
    watch.run(60)
    watch.run(20, bad=True)
    (alert, *_) = watch.evaluator.end("the agent has ended")
    assert (alert.status, alert.state) == ("firing", "blind")
    assert "the agent has ended" in alert.summary
    assert Watch().evaluator.end("x") == []


def test_another_first_cause_is_told_but_not_more_often_than_so(watch: Watch) -> None:
    watch.run(60)
    watch.run(30, bad=True)
    watch.told()
    for _ in range(400):
        watch.now_ns += S
        late = request(first_sent_ns=2000 * S + 900 * MS, sent_ns=2000 * S + 1600 * MS)
        watch.tick(*[late] * 5)  # nothing but its own work, half of it unattributed
    pages = [a for a in watch.alerts if a.labels["severity"] == "page"]
    assert [a.explanation.causes[0][0] for a in pages] == ["unattributed"]
    assert pages[0].now_ns - pages[0].since_ns >= RETELL_NS


def test_partial_and_unfinished_requests_are_not_judged(watch: Watch) -> None:
    watch.tick(request(partial=True), request(model="other"))
    assert [key.model for key in watch.evaluator.series] == ["other"]


def test_errors_and_goodput() -> None:
    limit = Limit("*", ttft_ns=500 * MS, errors_objective_ratio=0.99, goodput_objective_ratio=0.95)
    watch = Watch(SloFile(Limits((limit,))))
    failed = request(error="engine_error", finish_reason=None)
    watch.tick(
        request(),
        request(bad=True),
        failed,
        request(error="client_disconnect"),
        request(error="404"),
    )
    counted = {k.objective: (s.events, s.bad) for k, s in watch.evaluator.series.items()}
    assert counted == {"ttft": (2, 1), "errors": (3, 1), "goodput": (3, 2)}
    for _ in range(30):
        watch.now_ns += S
        watch.tick(failed)
    alerts = {a.labels["objective"]: a for a in watch.alerts if a.labels["severity"] == "page"}
    assert alerts["errors"].explanation.causes == (("error engine_error", 1.0),)
    assert "error engine_error" in alerts["goodput"].summary


def test_tenants_and_classes_are_split_and_bounded() -> None:
    limit = Limit("*", ttft_ns=500 * MS, by=("tenant", "prompt_class"))
    watch = Watch(SloFile(Limits((limit,), (16, 64))))
    watch.tick(
        request(tenant=None, prompt_tokens=16),
        request(tenant="a", prompt_tokens=17),
        request(tenant="a", prompt_tokens=None),
    )
    assert [(k.tenant, k.prompt_class) for k in watch.evaluator.series] == [
        (None, "le_16"),
        ("a", "le_64"),
        ("a", None),
    ]
    watch.tick(*(request(tenant=f"t{i}", prompt_tokens=65) for i in range(300)))
    tenants = {k.tenant for k in watch.evaluator.series} - {None}
    assert len(tenants) == 65
    assert "~other" in tenants
    store = Store()
    SloFigures(watch.evaluator).show(store)
    totals = [
        sum(p.value for p in family.numbers)
        for family in store.collect()
        if family.metric.name == "dsagent.slo.events"
    ]
    assert totals == [303]


def test_series_are_bounded() -> None:
    limit = Limit("*", ttft_ns=1, errors_objective_ratio=0.9, by=("tenant", "prompt_class"))
    watch = Watch(SloFile(Limits((limit,), tuple(range(1, 8)))))
    for tenant in range(70):
        watch.tick(*(request(tenant=f"t{tenant}", prompt_tokens=i) for i in range(1, 9)))
    assert len(watch.evaluator.series) <= 256 + 2 * 2
    assert sum(s.events for s in watch.evaluator.series.values()) == 70 * 8 * 2


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    objective=st.sampled_from([0.5, 0.9, 0.99, 0.999, 1.0]),
    ticks=st.lists(
        st.tuples(
            st.sampled_from([0.2, 1.0, 7.0, 60.0, 900.0, 90_000.0]),
            st.integers(0, 12),
            st.integers(0, 12),
            st.booleans(),
        ),
        max_size=40,
    ),
)
def test_whatever_comes_no_figure_is_nan_and_alerts_take_turns(
    objective: float, ticks: list[tuple[float, int, int, bool]]
) -> None:
    watch = Watch(objective_ratio=objective)
    figures, store = SloFigures(watch.evaluator), Store()
    for seconds, good, bad, sees in ticks:
        watch.now_ns += round(seconds * S)
        watch.sources = SEES if sees else SEES_NOT
        watch.tick(*[request()] * good, *[request(bad=True)] * bad)
        figures.show(store)
    for family in store.collect():
        assert family.metric in CATALOGUE
        assert all(math.isfinite(p.value) for p in family.numbers)
    for severity in ("page", "ticket"):
        burns = [
            a.status for a in watch.alerts if "slo" in a.labels and a.labels["severity"] == severity
        ]
        # Resolved only what fired, and never twice.
        for before, after in zip(["resolved", *burns], burns, strict=False):
            assert (before, after) != ("resolved", "resolved")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.booleans(), min_size=50, max_size=300))
def test_requests_within_the_objective_never_alarm(pattern: list[bool]) -> None:
    """At most one in a hundred bad, wherever they fall."""
    watch = Watch()
    since = 100
    for is_bad in pattern * 3:
        since += 1
        now_bad = is_bad and since >= 100
        since = 0 if now_bad else since
        watch.run(1, bad=now_bad)
    assert watch.told() == []


def test_no_flapping_at_the_threshold() -> None:
    """A seventh of the requests bad, around 14.4 %, for an hour: it fires, and that is all."""
    watch = Watch()
    for i in range(3600):
        watch.now_ns += S
        watch.tick(request(bad=i % 7 == 0))
    told = watch.told()
    assert ("firing", "burning", "page") in told
    assert not any(status == "resolved" for status, _, _ in told)


def test_time_that_goes_back_does_no_harm(watch: Watch) -> None:
    watch.run(60)
    watch.now_ns -= 30 * S
    watch.tick(request())
    assert watch.evaluator.now_ns == 5060 * S


def test_nothing_configured_is_nothing_seen() -> None:
    evaluator = Evaluator(SloFile(Limits()))
    assert evaluator.take([request()], SEES, S) == ([], [])
    assert evaluator.series == {}
