"""The agent itself: what it sees, what it lost, what it costs."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dsagent.agent.metrics import catalog
from dsagent.dashboards.board import start
from dsagent.dashboards.panels import figure, last, lines, query, states
from dsagent.dashboards.queries import OF_AGENT, by, rate, ratio, series, worst

HOW_TO_READ = """\
Read this before trusting the rest. A source that is not *ok* sees nothing of its kind: what it \
would have named is **unattributed** elsewhere. **Uncounted losses must be 0**: the agent knows \
of every record that it did not get. Its **cost to the target** stays below `--max-overhead` (1 \
%): it steps down by itself. Items failed or dropped at a sink never reached that back end, \
whatever it shows."""

STATES = {
    0: ("ok", "green"),
    1: ("lagging", "yellow"),
    2: ("unavailable", "blue"),
    3: ("failed", "red"),
}


WORSE = {rank: name for rank, (name, _) in STATES.items() if rank}


def board() -> dashboard.Dashboard:
    made = start(
        "the agent itself", "What the agent sees, what it lost, what it costs.", HOW_TO_READ
    )
    _now(made)
    _sources(made)
    _sinks(made)
    return made


def _now(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Now"))
    for title, unit, metric, red_from in (
        ("Uncounted losses", "short", catalog.UNCOUNTED_LOSSES, 1.0),
        ("Cost to the target", "percentunit", catalog.AGENT_OVERHEAD, 0.01),
        ("Memory of the agent", "bytes", catalog.AGENT_PSS, 120e6),
        ("Clock error", "s", catalog.CLOCK_ERROR, 0.001),
    ):
        expr = f"max({series(metric)})"
        made.with_panel(
            figure(title, unit, metric.description, last(expr, title), red_from=red_from)
        )


def _sources(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Sources"))
    made.with_panel(
        states(
            "Sources",
            "The state each source is in.",
            query(worst(catalog.SOURCE_STATE, "source", WORSE), "{{source}}"),
            STATES,
        )
    )
    for title, unit, what, targets in (
        (
            "Cost of the sources",
            "percentunit",
            "CPU that each source uses, in cores.",
            [query(by("source", rate(catalog.SOURCE_COST)), "{{source}}")],
        ),
        (
            "Lag of the sources",
            "s",
            catalog.SOURCE_LAG.description,
            [query(by("source", series(catalog.SOURCE_LAG), "max"), "{{source}}")],
        ),
        (
            "Records lost by sources",
            "cps",
            "Counted by the sources; accounts of that time say what was not looked at.",
            [query(by("source", rate(catalog.SOURCE_DROPPED)), "{{source}}")],
        ),
        (
            "CPU of the agent",
            "percentunit",
            "In cores, the kernel's part not included.",
            [query(by("instance", rate(catalog.AGENT_CPU)), "{{instance}}")],
        ),
        (
            "Events",
            "cps",
            catalog.EVENTS.description,
            [
                query(by("event", rate(catalog.EVENTS)), "{{event}}"),
                query(f"sum({rate(catalog.SAMPLES_UNKNOWN)})", "unknown samples"),
                query(f"sum({rate(catalog.SERIES_OVERFLOWED)})", "labels beyond the budget"),
                query(f"sum({rate(catalog.KERNEL_DELAYS_DROPPED)})", "kernel delays given up"),
            ],
        ),
    ):
        made.with_panel(lines(title, unit, what, *targets))


def _sinks(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Sinks"))
    made.with_panel(
        lines(
            "Sent and acknowledged",
            "cps",
            "Items handed to each back end, and those that it said it took.",
            query(by("sink", rate(catalog.SINK_SENT)), "{{sink}} sent"),
            query(by("sink", rate(catalog.SINK_ACKNOWLEDGED)), "{{sink}} acknowledged"),
        )
    )
    made.with_panel(
        lines(
            "Failed and dropped",
            "cps",
            "What a back end refused or did not answer for, and what was given up before.",
            query(by("sink", rate(catalog.SINK_FAILED)), "{{sink}} failed"),
            query(by("sink", rate(catalog.SINK_DROPPED)), "{{sink}} dropped"),
        )
    )
    made.with_panel(
        lines(
            "Waiting to be sent",
            "short",
            f"{catalog.SINK_QUEUED.description} What grows is a back end that does not keep up.",
            query(by("sink, kind", series(catalog.SINK_QUEUED)), "{{sink}} {{kind}}"),
        )
    )
    made.with_panel(
        lines(
            "Lost on the way, by why",
            "cps",
            catalog.SINK_LOST.description,
            query(by("sink, reason", rate(catalog.SINK_LOST)), "{{sink}}: {{reason}}"),
        )
    )
    made.with_panel(
        lines(
            "Engine's own spans, joined",
            "cps",
            catalog.ENGINE_SPANS.description,
            query(by("outcome", rate(catalog.ENGINE_SPANS)), "{{outcome}}"),
        )
    )
    agrees = by("figure", rate(catalog.ENGINE_SPAN_FIGURES, f'{OF_AGENT},agrees="true"'))
    made.with_panel(
        lines(
            "Engine's figures that agree with ours",
            "percentunit",
            catalog.ENGINE_SPAN_FIGURES.description,
            query(ratio(agrees, by("figure", rate(catalog.ENGINE_SPAN_FIGURES))), "{{figure}}"),
            most=1,
        )
    )
