"""The doctor on boards and rules with one fault each, and on ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made import MS, account, batch, step

from dsagent.agent.facts import Event, Sample, SourceStatus
from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.aggregate import Aggregate
from dsagent.agent.metrics.series import Family, NumberPoint
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.sinks.base import SinkStatus
from dsagent.agent.sinks.openmetrics import render
from dsagent.agent.slo import Limits
from dsagent.dashboards.doctor.check import Report, check
from dsagent.dashboards.doctor.known import Scrape
from dsagent.dashboards.generate import GENERATED, generated

# Of an engine whose V1 names are those of vLLM 0.11: the old name of the latency is still there.
PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 9
# TYPE vllm:time_per_output_token_seconds histogram
vllm:time_per_output_token_seconds_bucket{model_name="m",le="+Inf"} 1
vllm:time_per_output_token_seconds_sum{model_name="m"} 0.1
vllm:time_per_output_token_seconds_count{model_name="m"} 1
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{model_name="m",le="+Inf"} 1
vllm:inter_token_latency_seconds_sum{model_name="m"} 0.1
vllm:inter_token_latency_seconds_count{model_name="m"} 1
"""
THROUGH_A_VARIABLE = {"type": "prometheus", "uid": "${ds}"}


def board(*exprs: str, datasource: Any = THROUGH_A_VARIABLE, **more: Any) -> dict[str, Any]:
    return {
        "schemaVersion": 39,
        "templating": {"list": [{"name": "ds", "type": "datasource", "query": "prometheus"}]},
        "panels": [
            {
                "type": "row",
                "panels": [
                    {"title": f"p{n}", "datasource": datasource, "targets": [{"expr": expr}]}
                    for n, expr in enumerate(exprs)
                ],
            }
        ],
        **more,
    }


def examine(tmp_path: Path, *documents: Any, page: str | None = PAGE) -> list[Report]:
    paths = []
    for number, document in enumerate(documents):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(document))
    return check(paths, None if page is None else Scrape(page, "a page"))


def said(reports: list[Report]) -> list[str]:
    return [f"{each.problem}: {each.message}" for report in reports for each in report.findings]


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        ("vllm:gpu_cache_usage_perc", "renamed: vllm:gpu_cache_usage_perc is vllm:kv_cache_usage"),
        ("vllm:num_requests_swapped", "renamed: vllm:num_requests_swapped is no more"),
        (
            "rate(vllm:gpu_prefix_cache_hits_total[5m])",
            "renamed: vllm:gpu_prefix_cache_hits_total is vllm:prefix_cache_hits_total now",
        ),
        (
            "sum by (le) (vllm:time_per_output_token_seconds_bucket)",
            "deprecated: vllm:time_per_output_token_seconds_bucket will go: take vllm:inter_token",
        ),
        ("rate(vllm:prompt_tokens[5m])", "dead: there is no vllm:prompt_tokens; there is vllm:pro"),
        ("vllm:num_request_running", "dead: there is no vllm:num_request_running; is it vllm:num"),
        ("router_cpu_usage_percent", "dead: there is no router_cpu_usage_percent"),
        ("router_cpu or vector(0)", "dead: there is no router_cpu"),
        ("router_cpu or router_cpus", "dead: there is no router_cpu"),
        ('vllm:num_requests_running{model="m"}', "labels: vllm:num_requests_running has no label"),
        ('vllm:num_requests_running{model_name="$m"}', "variable: $m: the board has no such"),
        ("sum(vllm:num_requests_running", "syntax: unclosed"),
    ],
)
def test_one_fault_is_one_finding(tmp_path: Path, expr: str, message: str) -> None:
    found = said(examine(tmp_path, board(expr)))
    assert len(found) == 1, found
    assert found[0].startswith(message)


@pytest.mark.parametrize(
    "expr",
    [
        "sum by (model_name, instance) (vllm:num_requests_running)",  # the server adds instance
        'vllm:num_requests_running{job="any"}',
        "vllm:gpu_cache_usage_perc or vllm:kv_cache_usage_perc",  # for both versions
        "absent(vllm:never)",
        "1 + 1",
    ],
)
def test_what_is_right_is_left_alone(tmp_path: Path, expr: str) -> None:
    (report,) = examine(tmp_path, board(expr))
    assert said([report]) == []
    assert (report.expressions, report.alive, report.quiet) == (1, 1, [])


def test_an_old_server_keeps_its_old_names(tmp_path: Path) -> None:
    old = 'vllm:gpu_cache_usage_perc{model_name="m"} 1\n'
    assert said(examine(tmp_path, board("vllm:gpu_cache_usage_perc"), page=old)) == []


def test_a_value_that_no_series_has_now_is_quiet_and_no_fault(tmp_path: Path) -> None:
    (report,) = examine(tmp_path, board('vllm:num_requests_running{engine="7"}'))
    assert said([report]) == []
    (quiet,) = report.quiet
    assert quiet.reason == 'vllm:num_requests_running: no series now with {engine="7"}'


def test_without_metrics_the_file_itself_is_judged(tmp_path: Path) -> None:
    found = said(
        examine(tmp_path, board("sum(", "vllm:gpu_cache_usage_perc", "whatever"), page=None)
    )
    assert [each.split(":")[0] for each in found] == ["syntax", "renamed"]


@pytest.mark.parametrize(
    ("datasource", "message"),
    [
        ({"type": "prometheus", "uid": "prometheus"}, "fixed uid of a data source: 'prometheus'"),
        ("Prometheus", "fixed name of a data source: 'Prometheus'"),
        ({"type": "prometheus"}, "the data source has a type and no uid"),
        ({"type": "prometheus", "uid": "${gone}"}, "${gone}: the board has no such variable"),
        ("${DS_IMPORTED}", "${DS_IMPORTED} is filled in by an import only"),
    ],
)
def test_data_sources_go_through_variables(tmp_path: Path, datasource: Any, message: str) -> None:
    made = board("1", datasource=datasource, __inputs=[{"name": "DS_IMPORTED"}])
    (found,) = said(examine(tmp_path, made))
    assert found.startswith(f"datasource: {message}")


def test_other_kinds_of_data_sources_are_counted_and_not_read(tmp_path: Path) -> None:
    logs = board("{a=`b`} | json", datasource={"type": "loki", "uid": "${ds}"})
    logs["templating"]["list"][0]["query"] = "loki"
    (report,) = examine(tmp_path, logs, page=None)
    assert (report.elsewhere, report.expressions, report.findings) == (1, 0, [])


def test_one_uid_in_two_boards_and_an_old_format_are_found(tmp_path: Path) -> None:
    found = said(
        examine(tmp_path, board("1", uid="u"), board("1", uid="u", schemaVersion=22), page=None)
    )
    assert [each.split(":")[0] for each in found] == ["old", "uid"]


def test_what_variables_and_annotations_ask_is_checked_too(tmp_path: Path) -> None:
    made = board("1")
    made["templating"]["list"].append(
        {
            "name": "m",
            "type": "query",
            "datasource": THROUGH_A_VARIABLE,
            "query": {"query": "label_values(vllm:num_requests_running, model)"},
        }
    )
    made["annotations"] = {
        "list": [{"name": "a", "expr": "gone", "datasource": THROUGH_A_VARIABLE}]
    }
    found = said(examine(tmp_path, made))
    assert [each.split(":")[0] for each in found] == ["labels", "dead"]


def test_rules_are_checked_and_what_they_record_is_known(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(
        "groups:\n- name: g\n  rules:\n"
        "  - {record: 'a:b', expr: 'sum(vllm:num_requests_running)'}\n"
        "  - {alert: Known, expr: 'a:b > 1'}\n"
        "  - {alert: Dead, expr: 'a:c > 1'}\n"
    )
    managed = tmp_path / "managed.yaml"
    managed.write_text(
        "apiVersion: 1\ngroups:\n- name: g\n  rules:\n  - title: Managed\n    data:\n"
        "    - {refId: A, datasourceUid: x, model: {expr: 'gone'}}\n"
        "    - {refId: B, datasourceUid: __expr__, model: {expression: A}}\n"
    )
    reports = check([path, managed], Scrape(PAGE, "a page"))
    assert [(f.where, f.problem) for r in reports for f in r.findings] == [
        ("Dead", "dead"),
        ("Managed", "dead"),
    ]


def test_rules_for_the_prometheus_operator_are_the_same_rules(tmp_path: Path) -> None:
    rules = "groups: [{name: g, rules: [{record: 'a:b', expr: up}, {alert: Dead, expr: gone}]}]"
    (tmp_path / "plain.yaml").write_text(rules)
    (tmp_path / "operator.yaml").write_text(f"kind: PrometheusRule\nspec: {{{rules}}}")
    (tmp_path / "kustomization.yaml").write_text("kind: Kustomization\nresources: [operator.yaml]")
    paths = sorted(tmp_path.glob("*.yaml"))
    kustomization, operator, plain = check(paths, Scrape(PAGE + "up 1\n", "a page"))
    assert said([operator]) == said([plain]) != []
    assert said([kustomization]) == []


def state_of_agent() -> list[Family]:
    """What a session of every kind shows, but for devices."""
    state = Aggregate(Limits(), Sampler(rate=1.0), {})
    samples = [
        Sample(metric.name, 1.0, 0, dict.fromkeys(metric.attributes, "a"))
        for metric in (*catalog.PROCESS_METRICS, catalog.AGENT_PSS, catalog.AGENT_OVERHEAD)
    ]
    samples.append(Sample(catalog.AGENT_CPU.name, 1.0, 0))
    state.add(
        batch(
            now_ns=MS,
            accounts=(account(sampled=True),),
            steps=(step(), step(2, prefill_tokens=9)),
            samples=tuple(samples),
            events=(Event("stalled", 0, ""),),
            sources=(
                SourceStatus("steps", "ok"),
                SourceStatus("proc", "ok"),
                SourceStatus("kernel", "unavailable", "no BTF"),
                SourceStatus("nvml", "unavailable", "no driver"),
                SourceStatus("served", "ok"),
            ),
            sinks=(SinkStatus("otlp", 1, 1),),
        )
    )
    return state.collect()


def families() -> list[Family]:
    """And the engine's own page with it."""
    engine = [
        Family(metric, (NumberPoint((("cache_name", "prefix"),), 1.0),))
        for metric in (catalog.CACHE_HIT, catalog.CACHE_REQUEST)
    ]
    return [*state_of_agent(), *engine]


def own(page: str) -> list[Report]:
    return check([GENERATED / name for name in generated()], Scrape(page, "an agent"))


LATENCY_OF_LOOKUPS = 'cache_operation_latency_seconds_bucket{cache_name="a",result="hit",le="1"} 1'


def test_ours_have_no_dead_panel() -> None:
    reports = own(render(families(), openmetrics=False) + LATENCY_OF_LOOKUPS)
    assert said(reports) == []
    quiet = {each.reason for report in reports for each in report.quiet}
    assert "hw_power_watts: the source nvml is unavailable" in quiet
    assert "dsagent_kernel_step_delay_seconds_bucket: the source kernel is unavailable" in quiet


@pytest.mark.parametrize("metric", [catalog.REQUESTS, catalog.STEP_DURATION, catalog.SOURCE_STATE])
def test_a_renamed_metric_of_ours_is_a_dead_panel(metric: catalog.Metric) -> None:
    page = render(families(), openmetrics=False) + LATENCY_OF_LOOKUPS
    renamed = page.replace(metric.prometheus_family, f"{metric.prometheus_family}_renamed")
    findings = [finding for report in own(renamed) for finding in report.findings]
    assert findings
    assert {f.problem for f in findings} == {"dead"}
    assert any(metric.prometheus_family in f.message for f in findings)


def test_a_source_that_is_well_has_no_excuse() -> None:
    page = render(families(), openmetrics=False) + LATENCY_OF_LOOKUPS
    page = page.replace(
        'dsagent_source_state{source="nvml",state="ok"} 0.0',
        'dsagent_source_state{source="nvml",state="ok"} 1.0',
    ).replace(
        'dsagent_source_state{source="nvml",state="unavailable"} 1.0',
        'dsagent_source_state{source="nvml",state="unavailable"} 0.0',
    )
    assert any("hw_power_watts" in each for each in said(own(page)))


def test_without_the_engines_own_page_its_metrics_are_quiet_and_with_half_of_it_dead() -> None:
    page = render(state_of_agent(), openmetrics=False)
    reports = own(page)
    assert said(reports) == []
    assert any("not scraped here" in quiet.reason for report in reports for quiet in report.quiet)
    half = "cache_request_total 1\n"
    assert any("there is no cache_hit_total" in each for each in said(own(page + half)))
