"""The first board: how slow requests are, where their time went, what the engine did meanwhile."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    VariableRefresh,
    VariableSort,
)

from dsagent.agent import catalog
from dsagent.agent.catalog import Metric
from dsagent.dashboards.panels import (
    DATASOURCE,
    bars,
    buckets,
    figure,
    last,
    lines,
    query,
    states,
)

_OF_AGENT = 'instance=~"$instance"'
_OF_REQUESTS = f'{_OF_AGENT},gen_ai_request_model=~"$model"'
_CACHE = 'cache_name="prefix"'


def _rate(metric: Metric, matchers: str = _OF_AGENT, suffix: str = "") -> str:
    return f"rate({metric.prometheus}{suffix}{{{matchers}}}[$__rate_interval])"


def _heat(metric: Metric, matchers: str) -> str:
    name = metric.prometheus
    return f"sum by (le) (increase({name}_bucket{{{matchers}}}[$__rate_interval]))"


def _per_request(causes: Metric, requests: str) -> str:
    """Mean seconds of a request that went to each cause."""
    of_causes = f"sum by (cause) ({_rate(causes, _OF_REQUESTS)})"
    return f"{of_causes} / ignoring(cause) group_left sum({requests})"


def board() -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard("dsagent: where the time went")
        .description("Where each request's time went, and who is to blame. Made by dashboards/.")
        .tags(["dsagent", "llm"])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(_variable("instance", catalog.TARGET_INFO, "instance"))
        .with_variable(_variable("model", catalog.REQUESTS, "gen_ai_request_model"))
    )
    _latency(made)
    _causes(made)
    _steps(made)
    _agent(made)
    return made


def _variable(name: str, metric: Metric, label: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .datasource(DATASOURCE)
        .query(f"label_values({metric.prometheus}, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _latency(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Latency"))
    for title, metric in (
        ("Time to first token", catalog.TIME_TO_FIRST_TOKEN),
        ("Time per output token", catalog.TIME_PER_OUTPUT_TOKEN),
    ):
        made.with_panel(
            buckets(
                title,
                "s",
                f"{metric.description} A point is a kept trace: click it to open the trace.",
                _heat(metric, _OF_REQUESTS),
            )
        )
    made.with_panel(
        lines(
            "Requests",
            "reqps",
            "Ended requests by outcome.",
            query(f"sum by (outcome) ({_rate(catalog.REQUESTS, _OF_REQUESTS)})", "{{outcome}}"),
        )
    )
    duration = f"sum by (le) ({_rate(catalog.REQUEST_DURATION, _OF_REQUESTS, '_bucket')})"
    made.with_panel(
        lines(
            "Request duration",
            "s",
            catalog.REQUEST_DURATION.description,
            *(
                query(f"histogram_quantile({quantile}, {duration})", legend, exemplars=True)
                for quantile, legend in ((0.5, "median"), (0.9, "p90"), (0.99, "p99"))
            ),
        )
    )


def _causes(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Where the time went"))
    whole = 'partial="false"'
    ended = _rate(catalog.REQUESTS, f"{_OF_REQUESTS},{whole}")
    made.with_panel(
        lines(
            "Mean request, by cause",
            "s",
            "What the mean request's duration is made of; unattributed is the honest rest.",
            query(_per_request(catalog.REQUEST_CAUSE, ended), "{{cause}}"),
            stacked=True,
        )
    )
    first_tokens = _rate(catalog.TTFT_CAUSE, _OF_REQUESTS)
    made.with_panel(
        lines(
            "Time to first token, by cause",
            "percentunit",
            "Shares of the time up to the first token.",
            query(
                f"sum by (cause) ({first_tokens}) / ignoring(cause) group_left sum({first_tokens})",
                "{{cause}}",
            ),
            stacked=True,
        )
    )
    of_causes = f"increase({catalog.REQUEST_CAUSE.prometheus}{{{_OF_REQUESTS}}}[$__range])"
    made.with_panel(
        bars(
            "Largest causes",
            "s",
            "Time of all requests in the range shown.",
            last(f"topk(12, sum by (cause, how) ({of_causes}))", "{{cause}} {{how}}"),
        )
    )
    unattributed = _rate(catalog.REQUEST_CAUSE, f'{_OF_REQUESTS},cause="unattributed"')
    made.with_panel(
        lines(
            "Unattributed",
            "percentunit",
            "The share of all requests' time that no fact explains.",
            query(
                f"sum({unattributed}) / sum({_rate(catalog.REQUEST_CAUSE, _OF_REQUESTS)})",
                "unattributed",
            ),
        )
    )


def _steps(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Engine steps"))
    made.with_panel(
        buckets(
            "Step duration",
            "s",
            catalog.STEP_DURATION.description,
            _heat(catalog.STEP_DURATION, _OF_AGENT),
        )
    )
    made.with_panel(
        lines(
            "Steps",
            "ops",
            "Steps per second, by phase.",
            query(
                f"sum by (phase) ({_rate(catalog.STEP_DURATION, _OF_AGENT, '_count')})", "{{phase}}"
            ),
        )
    )
    made.with_panel(
        lines(
            "Loop time, by part of the step",
            "s",
            "Seconds of the engine's loop per second; what is missing to 1 is idle.",
            query(f"sum by (part) ({_rate(catalog.STEP_PART)})", "{{part}}"),
            stacked=True,
        )
    )
    batch_sum = f"sum({_rate(catalog.STEP_BATCH, _OF_AGENT, '_sum')})"
    batch_count = f"sum({_rate(catalog.STEP_BATCH, _OF_AGENT, '_count')})"
    made.with_panel(
        lines(
            "Batch and queue",
            "short",
            "Mean requests in a step, and requests waiting and running.",
            query(f"{batch_sum} / {batch_count}", "batch"),
            query(f"sum({catalog.REQUESTS_WAITING.prometheus}{{{_OF_AGENT}}})", "waiting"),
            query(f"sum({catalog.REQUESTS_RUNNING.prometheus}{{{_OF_AGENT}}})", "running"),
        )
    )
    made.with_panel(
        lines(
            "Tokens",
            "short",
            "Tokens computed per second, by phase.",
            query(f"sum by (phase) ({_rate(catalog.STEP_TOKENS)})", "{{phase}}"),
        )
    )
    used = f"sum by (instance) ({catalog.KV_BLOCKS_USED.prometheus}{{{_OF_AGENT}}})"
    limit = f"sum by (instance) ({catalog.KV_BLOCKS_LIMIT.prometheus}{{{_OF_AGENT}}})"
    hits = f"sum by (instance) (rate(cache_hit_total{{{_CACHE}}}[$__rate_interval]))"
    lookups = f"sum by (instance) (rate(cache_request_total{{{_CACHE}}}[$__rate_interval]))"
    made.with_panel(
        lines(
            "KV cache",
            "percentunit",
            "Blocks in use, and blocks of prompts found in the prefix cache (the engine's own).",
            query(f"{used} / {limit}", "used {{instance}}"),
            query(f"{hits} / {lookups}", "prefix hits {{instance}}"),
        )
    )


def _agent(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("The agent itself"))
    made.with_panel(
        states(
            "Sources",
            "The state each source is in.",
            query(
                f"max by (source, state) ({catalog.SOURCE_STATE.prometheus}{{{_OF_AGENT}}}) > 0",
                "{{source}} {{state}}",
            ),
        )
    )
    made.with_panel(
        lines(
            "Cost of the sources",
            "percentunit",
            "CPU that each source uses, in cores.",
            query(f"sum by (source) ({_rate(catalog.SOURCE_COST)})", "{{source}}"),
        )
    )
    counted = (
        (catalog.SOURCE_DROPPED, "source", "lost by"),
        (catalog.SINK_FAILED, "sink", "failed at"),
        (catalog.SINK_DROPPED, "sink", "dropped by"),
    )
    made.with_panel(
        lines(
            "Losses",
            "cps",
            "What was lost, counted: by sources, and on the way to back ends.",
            *(
                query(f"sum by ({label}) ({_rate(metric)})", f"{verb} {{{{{label}}}}}")
                for metric, label, verb in counted
            ),
        )
    )
    for title, unit, metric in (
        ("Uncounted losses", "short", catalog.UNCOUNTED_LOSSES),
        ("Cost to the target", "percentunit", catalog.AGENT_OVERHEAD),
        ("Memory of the agent", "bytes", catalog.AGENT_PSS),
        ("Clock error", "s", catalog.CLOCK_ERROR),
    ):
        expr = f"max({metric.prometheus}{{{_OF_AGENT}}})"
        made.with_panel(figure(title, unit, metric.description, last(expr, title)))
