"""What every board has: its data source, what it is narrowed to, the way to the others."""

from __future__ import annotations

from collections.abc import Iterable

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.catalog import Metric
from dsagent.dashboards.panels import DATASOURCE, explanation

TAG = "dsagent"


def label_variable(
    name: str, label: str, query_label: str, metric: Metric, suffix: str = ""
) -> dashboard.QueryVariable:
    """All values of one label of a metric; all of them at first."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(f"label_values({metric.prometheus}{suffix}, {query_label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def limit_variable(
    name: str, label: str, metric: Metric, at_first: float
) -> dashboard.QueryVariable:
    """One bound of a histogram. Every limit of the agent's SLO file is among them."""
    assert at_first in metric.bounds
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(f"label_values({metric.prometheus}_bucket, le)")
        .regex("/^[0-9.e+-]+$/")  # +Inf is no limit
        .refresh(VariableRefresh.ON_DASHBOARD_LOAD)
        .sort(VariableSort.NUMERICAL_ASC)
        .current(VariableOption(text=str(at_first), value=str(at_first)))
    )


AGENTS = label_variable("instance", "Agent", "instance", catalog.TARGET_INFO)
MODELS = label_variable("model", "Model", "gen_ai_request_model", catalog.REQUESTS)


def start(
    title: str,
    description: str,
    how_to_read: str,
    variables: Iterable[dashboard.QueryVariable] = (AGENTS,),
) -> dashboard.Dashboard:
    """A board with its explanation, ready for rows of panels."""
    made = (
        dashboard.Dashboard(f"dsagent: {title}")
        .description(f"{description} Made by dashboards/ of dsagent.")
        .tags([TAG, "llm"])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            dashboard.DashboardLink("Other boards of dsagent")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Metrics").type("prometheus")
        )
    )
    for variable in variables:
        made.with_variable(variable)
    return made.with_panel(explanation(how_to_read))
