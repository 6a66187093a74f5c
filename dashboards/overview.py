"""Are we good now, and if not: which figure, and what is it made of?"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dsagent.agent.metrics import catalog
from dsagent.dashboards import causes
from dsagent.dashboards.board import AGENTS, MODELS, limit_variable, start
from dsagent.dashboards.panels import bars, figure, last, lines, query, states
from dsagent.dashboards.queries import (
    OF_AGENT,
    OF_REQUESTS,
    by,
    increase,
    quantile,
    rate,
    ratio,
    series,
    within,
    worst,
)

HOW_TO_READ = """\
From the top: how requests do now, then the share of them **within a limit** (choose the limits \
above; every limit of the agent's SLO file is among them), then what the mean request's time \
went to. A dip in a share says *that* it is slow; the colour that grows in *Mean request, by \
cause* says *why*. Next: **latency** for the spread and traces, **where the time went** for \
causes, **engine steps** for the batch. Nothing shown means that nobody was served, not that all \
was well."""

LIMITS = (
    ("ttft_limit", "TTFT limit, s", catalog.TIME_TO_FIRST_TOKEN, 1.0),
    ("tpot_limit", "Time per token limit, s", catalog.TIME_PER_OUTPUT_TOKEN, 0.1),
    ("e2e_limit", "Duration limit, s", catalog.REQUEST_DURATION, 10.24),
)
OK = 'outcome=~"stop|length|tool_calls"'


def board() -> dashboard.Dashboard:
    limits = [limit_variable(*limit) for limit in LIMITS]
    made = start(
        "overview and SLO",
        "How requests do, against their limits, and what their time goes to.",
        HOW_TO_READ,
        [AGENTS, MODELS, *limits],
    )
    _now(made)
    _objectives(made)
    _limits(made)
    _why(made)
    return made


def _now(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Now"))
    ended = f"sum({rate(catalog.REQUESTS, OF_REQUESTS)})"
    well = f"sum({rate(catalog.REQUESTS, f'{OF_REQUESTS},{OK}')})"
    unattributed = rate(catalog.REQUEST_CAUSE, f'{OF_REQUESTS},cause="unattributed"')
    all_time = f"sum({rate(catalog.REQUEST_CAUSE, OF_REQUESTS)})"
    for panel in (
        figure(
            "Requests per second", "reqps", "Requests that ended.", last(ended, "requests"), width=4
        ),
        figure(
            "Ended well",
            "percentunit",
            "Of the requests that ended: those with a reply, not a failure or an abort.",
            last(ratio(well, ended), "well"),
            width=4,
            green_from=0.99,
        ),
        figure(
            "Time to first token, p99",
            "s",
            "99 of 100 requests had their first token sooner.",
            last(quantile(0.99, catalog.TIME_TO_FIRST_TOKEN, OF_REQUESTS), "p99"),
            width=4,
        ),
        figure(
            "Time per output token, p99",
            "s",
            "99 of 100 requests were quicker, over their tokens after the first.",
            last(quantile(0.99, catalog.TIME_PER_OUTPUT_TOKEN, OF_REQUESTS), "p99"),
            width=4,
        ),
        figure(
            "Waiting",
            "short",
            "Requests not admitted after the last step was scheduled.",
            last(f"sum({series(catalog.REQUESTS_WAITING)})", "waiting"),
            width=4,
        ),
        figure(
            "Unexplained",
            "percentunit",
            "The share of all requests' time that no fact explains.",
            last(ratio(f"sum({unattributed})", all_time), "unattributed"),
            width=4,
            red_from=0.1,
        ),
    ):
        made.with_panel(panel)


STATES = {
    0: ("ok", "green"),
    1: ("not enough data", "blue"),
    2: ("blind", "purple"),
    3: ("ticket", "orange"),
    4: ("page", "red"),
}
OF_OBJECTIVE = "slo, objective, gen_ai_request_model"


def _objectives(made: dashboard.Dashboard) -> None:
    """What the agent's own evaluator finds; Prometheus' rules come to the same."""
    made.with_row(dashboard.Row("Objectives of the SLO file"))
    of_each = "{{slo}} {{objective}} {{gen_ai_request_model}}"
    worse = {1: "not_enough_data", 2: "blind", 3: "ticket", 4: "page"}
    made.with_panel(
        states(
            "State",
            "The worst of each objective's tenants and prompt classes. Blind: the agent cannot see "
            "the server's requests.",
            query(worst(catalog.SLO_STATE, OF_OBJECTIVE, worse, OF_REQUESTS), of_each),
            STATES,
        )
    )
    made.with_panel(
        lines(
            "Burn rate",
            "short",
            "How many times faster than allowed the budget burns: 1 just lasts, 14.4 is gone in "
            "two days of a month.",
            query(
                by("slo, objective, window", series(catalog.SLO_BURN_RATE, OF_REQUESTS), "max"),
                "{{slo}} {{objective}} {{window}}",
            ),
        )
    )
    bad, events = (
        by(OF_OBJECTIVE, increase(metric, OF_REQUESTS, over="$__range"))
        for metric in (catalog.SLO_BAD, catalog.SLO_EVENTS)
    )
    made.with_panel(
        bars(
            "Missed in the range",
            "percentunit",
            "The share of requests that did not meet each objective.",
            last(ratio(bad, events), of_each),
        )
    )
    made.with_panel(
        lines(
            "Burnt budget, by cause",
            "s",
            f"{catalog.SLO_BURNT.description} Per second.",
            query(by("cause", rate(catalog.SLO_BURNT, OF_REQUESTS)), "{{cause}}"),
            stacked=True,
        )
    )
    of_circuit = "{{cache_name}}: {{action}}"
    made.with_panel(
        lines(
            "Hit rate that the cache alerts judge",
            "percentunit",
            catalog.CACHE_HIT_RATIO.description,
            query(by("cache_name, action", series(catalog.CACHE_HIT_RATIO), "min"), of_circuit),
            most=1,
        )
    )
    made.with_panel(
        lines(
            "Open circuits of the cache alerts",
            "short",
            catalog.CACHE_CIRCUIT.description,
            query(by("cache_name, action", series(catalog.CACHE_CIRCUIT), "max"), of_circuit),
        )
    )


def _limits(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Against the limits chosen above"))
    names = ("First token", "Time per output token", "Duration")
    for name, (variable, _, metric, _) in zip(names, LIMITS, strict=True):
        made.with_panel(
            figure(
                f"{name} within its limit",
                "percentunit",
                "The share of requests in the range shown that were no slower than the limit.",
                last(within(metric, f"${variable}", OF_REQUESTS, "$__range"), name),
                width=8,
                green_from=0.99,
            )
        )
    made.with_panel(
        lines(
            "Within the limits",
            "percentunit",
            "The share of requests that were no slower than each limit, over time.",
            *(
                query(within(metric, f"${variable}", OF_REQUESTS), f"{name} ≤ ${variable} s")
                for name, (variable, _, metric, _) in zip(names, LIMITS, strict=True)
            ),
            most=1,
        )
    )
    made.with_panel(
        lines(
            "Requests by outcome",
            "reqps",
            "How requests ended: stop and length are replies, the others are errors and aborts.",
            query(by("outcome", rate(catalog.REQUESTS, OF_REQUESTS)), "{{outcome}}"),
            stacked=True,
        )
    )


def _why(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("What it is made of"))
    made.with_panel(causes.mean_by_cause())
    made.with_panel(
        lines(
            "Request duration",
            "s",
            f"{catalog.REQUEST_DURATION.description} A point is a kept trace.",
            *(
                query(quantile(q, catalog.REQUEST_DURATION, OF_REQUESTS), legend, exemplars=True)
                for q, legend in ((0.5, "median"), (0.9, "p90"), (0.99, "p99"))
            ),
        )
    )
    made.with_panel(
        lines(
            "Tokens",
            "short",
            "Tokens computed per second, by phase: the load that all this comes with.",
            query(by("phase", rate(catalog.STEP_TOKENS)), "{{phase}}"),
        )
    )
    made.with_panel(
        lines(
            "Losses of the agent",
            "short",
            "Whether to trust the above: records lost, and readings that failed. 0 is right.",
            query(f"sum({increase(catalog.SOURCE_DROPPED, OF_AGENT)})", "lost, counted"),
            query(f"sum({series(catalog.UNCOUNTED_LOSSES)})", "lost, uncounted"),
        )
    )
