"""How slow, for how many, since when; and a trace of one that was."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.catalog import Metric
from dsagent.dashboards.board import AGENTS, MODELS, start
from dsagent.dashboards.panels import WHOLE, buckets, lines, query
from dsagent.dashboards.queries import OF_REQUESTS, heat, quantile

HOW_TO_READ = """\
Darker is more requests. **A second dark band** means two kinds of requests (short and long \
prompts, cache hits and misses): an average would hide both. **A band that climbs** is \
saturation; **a lone stripe upwards** is one event, to be looked for at the same time on \
*kernel* or *engine steps*. A blue point is a kept trace: click it to open the trace, and from \
there its logs and its profile (*one request* has all three on one page)."""

QUANTILES = ((0.5, "median"), (0.9, "p90"), (0.99, "p99"))


def board() -> dashboard.Dashboard:
    made = start(
        "latency",
        "Heatmaps of the times that users feel, with traces as points.",
        HOW_TO_READ,
        [AGENTS, MODELS],
    )
    for title, metric in (
        ("Time to first token", catalog.TIME_TO_FIRST_TOKEN),
        ("Time per output token", catalog.TIME_PER_OUTPUT_TOKEN),
        ("Request duration", catalog.REQUEST_DURATION),
    ):
        _latency(made, title, metric)
    made.with_row(dashboard.Row("What was asked for"))
    for title, kind in (("Tokens of prompts", "input"), ("Tokens of replies", "output")):
        matchers = f'{OF_REQUESTS},gen_ai_token_type="{kind}"'
        made.with_panel(
            buckets(
                title,
                "short",
                "Requests by their number of tokens: longer ones take longer, which is no fault.",
                heat(catalog.TOKEN_USAGE, matchers),
            )
        )
    made.with_panel(
        lines(
            "Time to first token by model, p90",
            "s",
            "Which model it is.",
            query(
                quantile(
                    0.9, catalog.TIME_TO_FIRST_TOKEN, OF_REQUESTS, labels="gen_ai_request_model"
                ),
                "{{gen_ai_request_model}}",
            ),
            width=WHOLE,
        )
    )
    return made


def _latency(made: dashboard.Dashboard, title: str, metric: Metric) -> None:
    made.with_row(dashboard.Row(title))
    made.with_panel(
        buckets(
            title,
            "s",
            f"{metric.description} A point is a kept trace: click it to open the trace.",
            heat(metric, OF_REQUESTS),
            width=16,
        )
    )
    made.with_panel(
        lines(
            f"{title}: quantiles",
            "s",
            "From the histogram's buckets: no finer than their bounds.",
            *(
                query(quantile(q, metric, OF_REQUESTS), legend, exemplars=True)
                for q, legend in QUANTILES
            ),
            width=8,
        )
    )
