"""Where the time went: every millisecond of every request, by cause."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, timeseries

from dsagent.agent.metrics import catalog
from dsagent.dashboards.board import AGENTS, MODELS, start
from dsagent.dashboards.panels import WHOLE, bars, last, lines, query, rows
from dsagent.dashboards.queries import OF_REQUESTS, by, increase, per_request, rate, ratio

HOW_TO_READ = """\
The parts of each request's time add up to its duration. **A request's own computing** \
(prefill.compute, decode.compute) is what it would take alone: mostly the largest part, and no \
reason. Look at *Without its own computing*: the colour that grew when it became slow is the \
reason. Then ask the agent who did it: `dsagent why --last 10m`, or `dsagent explain TRACE_ID` \
for one request. *Measured* was seen, *modelled* follows from the engine's usual step, *assumed* \
has little to go by. **Unattributed** is what no fact explains; it is never hidden in another \
part."""

OWN = 'cause!~"prefill.compute|decode.compute"'
WHOLE_ONES = 'partial="false"'


def board() -> dashboard.Dashboard:
    made = start(
        "where the time went",
        "The time of requests by cause, over time.",
        HOW_TO_READ,
        [AGENTS, MODELS],
    )
    _requests(made)
    _first_token(made)
    _evidence(made)
    return made


def mean_by_cause() -> timeseries.Panel:
    """What the mean of the whole requests is made of."""
    ended = rate(catalog.REQUESTS, f"{OF_REQUESTS},{WHOLE_ONES}")
    return lines(
        "Mean request, by cause",
        "s",
        "What the mean request's duration is made of; unattributed is the honest rest.",
        query(per_request(catalog.REQUEST_CAUSE, ended), "{{cause}}"),
        stacked=True,
    )


def _requests(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Whole requests"))
    ended = rate(catalog.REQUESTS, f"{OF_REQUESTS},{WHOLE_ONES}")
    made.with_panel(mean_by_cause())
    made.with_panel(
        lines(
            "Without its own computing",
            "s",
            "The same without what a clean step takes for it: waiting, others, the machine.",
            query(per_request(catalog.REQUEST_CAUSE, ended, f"{OF_REQUESTS},{OWN}"), "{{cause}}"),
            stacked=True,
        )
    )
    made.with_panel(
        rows(
            "Causes over time",
            "s",
            "Seconds of requests' lives lost to each cause per second: several requests may wait "
            "at once, so that this may exceed 1.",
            query(by("cause", rate(catalog.REQUEST_CAUSE, f"{OF_REQUESTS},{OWN}")), "{{cause}}"),
            width=16,
        )
    )
    of_causes = increase(catalog.REQUEST_CAUSE, OF_REQUESTS, over="$__range")
    made.with_panel(
        bars(
            "Largest causes",
            "s",
            "Time of all requests in the range shown.",
            last(f"topk(12, {by('cause', of_causes)})", "{{cause}}"),
            width=8,
        )
    )


def _first_token(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Up to the first token"))
    first = rate(catalog.TTFT_CAUSE, OF_REQUESTS)
    made.with_panel(
        lines(
            "Time to first token, by cause",
            "percentunit",
            "Shares of the time up to the first token.",
            query(f"{by('cause', first)} / ignoring(cause) group_left sum({first})", "{{cause}}"),
            stacked=True,
            most=1,
        )
    )
    over = increase(catalog.TTFT_CAUSE, OF_REQUESTS, over="$__range")
    made.with_panel(
        bars(
            "Largest causes up to the first token",
            "s",
            "Time of all requests in the range shown.",
            last(f"topk(8, {by('cause', over)})", "{{cause}}"),
        )
    )


def _evidence(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("How well it is known"))
    whole = f"sum({rate(catalog.REQUEST_CAUSE, OF_REQUESTS)})"
    unattributed = rate(catalog.REQUEST_CAUSE, f'{OF_REQUESTS},cause="unattributed"')
    known = rate(catalog.REQUEST_CAUSE, f'{OF_REQUESTS},how!=""')
    made.with_panel(
        lines(
            "Unattributed",
            "percentunit",
            "The share of all requests' time that no fact explains.",
            query(ratio(f"sum({unattributed})", whole), "unattributed"),
        )
    )
    made.with_panel(
        lines(
            "Measured, modelled, assumed",
            "percentunit",
            "How the parts are known, as shares of all requests' time.",
            query(f"{by('how', known)} / ignoring(how) group_left {whole}", "{{how}}"),
            stacked=True,
            most=1,
        )
    )
    made.with_panel(
        lines(
            "Requests accounted for",
            "reqps",
            "Partial ones began before the agent attached: they are counted and not in the above.",
            query(by("partial", rate(catalog.REQUESTS, OF_REQUESTS)), "partial: {{partial}}"),
            width=WHOLE,
        )
    )
