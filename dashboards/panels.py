"""Panels as the boards use them: a title, a unit, a description and queries, nothing else.

Every panel asks the data source that the board's variable names; no uid is fixed.
"""

from __future__ import annotations

from string import ascii_uppercase

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT, WIDTH = 8, 12  # of 24 columns


def query(expr: str, legend: str, *, exemplars: bool = False) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .datasource(DATASOURCE)
        .expr(expr)
        .legend_format(legend)
        .exemplar(exemplars)
        .range()
        .ref_id("A")
    )


def last(expr: str, legend: str) -> prometheus.Dataquery:
    """One value, now or over the whole range of the board."""
    made = prometheus.Dataquery().datasource(DATASOURCE).expr(expr).legend_format(legend)
    return made.instant().ref_id("A")


def lines(
    title: str, unit: str, description: str, *queries: prometheus.Dataquery, stacked: bool = False
) -> timeseries.Panel:
    """`stacked`: filled areas on top of each other."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .height(HEIGHT)
        .span(WIDTH)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
        )
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
        panel.fill_opacity(60).line_width(0)
    for letter, target in zip(ascii_uppercase, queries, strict=False):
        panel.with_target(target.ref_id(letter))
    return panel


def buckets(title: str, unit: str, description: str, expr: str) -> heatmap.Panel:
    """A heatmap of a histogram: `expr` sums by `le`. Format heatmap makes Grafana order the
    buckets by their bound; as time series they would be sorted as text."""
    target = query(expr, "{{le}}", exemplars=True).format(PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("short")
        .height(HEIGHT)
        .span(WIDTH)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_values(heatmap.CellValues().unit("short"))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .fill("dark-orange")
            .exponent(0.5)
            .steps(64)
        )
        .exemplars_color("rgba(0,128,255,0.8)")
        .show_legend()
        .with_target(target)
    )


def bars(title: str, unit: str, description: str, target: prometheus.Dataquery) -> bargauge.Panel:
    """The largest values over the board's range, one bar each."""
    return (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .height(HEIGHT)
        .span(WIDTH)
        .orientation(VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .with_target(target)
    )


def figure(title: str, unit: str, description: str, target: prometheus.Dataquery) -> stat.Panel:
    """One number."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .height(HEIGHT // 2)
        .span(WIDTH // 2)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .with_target(target)
    )


def states(title: str, description: str, target: prometheus.Dataquery) -> statetimeline.Panel:
    """A row a series, coloured while it is not 0."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("short")
        .height(HEIGHT)
        .span(WIDTH)
        .with_target(target)
    )
