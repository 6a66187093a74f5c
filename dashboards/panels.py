"""Panels as the boards use them: a title, a unit, a description and queries, nothing else.

Every panel asks the data source that the board's variable names; no uid is fixed.
"""

from __future__ import annotations

from string import ascii_uppercase

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    text,
    timeseries,
)
from grafana_foundation_sdk.models.common import (
    HeatmapCellLayout,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT, WIDTH, WHOLE = 8, 12, 24  # of 24 columns
TEXT_HEIGHT = 4
LEAST_COUNT = 1e-9  # a bucket without observations stays without colour


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


def explanation(markdown: str) -> text.Panel:
    """How to read the board; the first thing on each."""
    return (
        text.Panel()
        .title("How to read this")
        .mode(TextMode.MARKDOWN)
        .content(markdown)
        .height(TEXT_HEIGHT)
        .span(WHOLE)
    )


def lines(
    title: str,
    unit: str,
    description: str,
    *queries: prometheus.Dataquery,
    stacked: bool = False,
    most: float | None = None,
    width: int = WIDTH,
) -> timeseries.Panel:
    """`stacked`: filled areas on top of each other; `most`: the end of the axis."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .height(HEIGHT)
        .span(width)
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
    else:
        panel.fill_opacity(8).line_width(2)
    if most is not None:
        panel.max(most)
    for letter, target in zip(ascii_uppercase, queries, strict=False):
        panel.with_target(target.ref_id(letter))
    return panel


def _heatmap(title: str, description: str, unit: str, cells: str, width: int) -> heatmap.Panel:
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(cells)
        .height(HEIGHT)
        .span(width)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_values(heatmap.CellValues().unit(cells))
        .show_legend()
    )


def _scheme(name: str, exponent: float = 0.5) -> heatmap.HeatmapColorOptions:
    return (
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme(name)
        .fill("dark-orange")
        .exponent(exponent)
        .steps(64)
    )


def buckets(
    title: str, unit: str, description: str, expr: str, *, width: int = WIDTH
) -> heatmap.Panel:
    """A heatmap of a histogram: `expr` sums by `le`. Format heatmap makes Grafana order the
    buckets by their bound; as time series they would be sorted as text."""
    target = query(expr, "{{le}}", exemplars=True).format(PromQueryFormat.HEATMAP)
    return (
        _heatmap(title, description, unit, "short", width)
        .color(_scheme("Oranges"))
        .filter_values(heatmap.FilterValueRange().le(LEAST_COUNT))
        .exemplars_color("rgba(0,128,255,0.8)")
        .with_target(target)
    )


def rows(
    title: str, unit: str, description: str, target: prometheus.Dataquery, *, width: int = WIDTH
) -> heatmap.Panel:
    """A heatmap with a row a series, coloured by its value in `unit`. Grafana orders rows whose
    names are all numbers by number, others as they come: Prometheus' order of the labels."""
    return (
        _heatmap(title, description, "string", unit, width)
        .color(_scheme("Oranges"))
        .filter_values(heatmap.FilterValueRange().le(LEAST_COUNT))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(HeatmapCellLayout.AUTO))
        .with_target(target.format(PromQueryFormat.TIME_SERIES))
    )


def shares(
    title: str,
    description: str,
    target: prometheus.Dataquery,
    *,
    cell: str,
    good_is_high: bool,
    width: int = WHOLE,
) -> heatmap.Panel:
    """A row a series and a column each `cell` ("5m"), from 0 to 1: red at the bad end, green at
    the good one. Grafana turns the scheme RdYlGn round by itself (red is high), so that it must be
    turned again where high is good."""
    return (
        _heatmap(title, description, "string", "percentunit", width)
        .color(_scheme("RdYlGn", 1.0).min(0).max(1).reverse(good_is_high))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(HeatmapCellLayout.AUTO))
        # Grafana hides what is no more than 1e-9 unless told otherwise: 0 % must be red.
        .filter_values(heatmap.FilterValueRange().le(-1))
        .interval(cell)
        .with_target(target.format(PromQueryFormat.TIME_SERIES))
    )


def bars(
    title: str, unit: str, description: str, target: prometheus.Dataquery, *, width: int = WIDTH
) -> bargauge.Panel:
    """The largest values over the board's range, one bar each."""
    return (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .height(HEIGHT)
        .span(width)
        .orientation(VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .with_target(target)
    )


def figure(
    title: str,
    unit: str,
    description: str,
    target: prometheus.Dataquery,
    *,
    width: int = 6,
    red_from: float | None = None,
    green_from: float | None = None,
) -> stat.Panel:
    """One number; red from one value on, or green from one on and red below."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .height(HEIGHT // 2)
        .span(width)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .with_target(target)
    )
    if red_from is not None:
        panel.thresholds(_thresholds("green", red_from, "red"))
    if green_from is not None:
        panel.thresholds(_thresholds("red", green_from, "green"))
    return panel


def _thresholds(below: str, at: float, above: str) -> dashboard.ThresholdsConfig:
    steps = [Threshold(value=None, color=below), Threshold(value=at, color=above)]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def states(
    title: str,
    description: str,
    target: prometheus.Dataquery,
    meanings: dict[int, tuple[str, str]],
    *,
    width: int = WIDTH,
) -> statetimeline.Panel:
    """A row a series; `meanings`: value → (text, colour)."""
    mapping = ValueMap(
        options={
            str(value): ValueMappingResult(text=name, color=colour, index=at)
            for at, (value, (name, colour)) in enumerate(meanings.items())
        }
    )
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("short")
        .height(HEIGHT)
        .span(width)
        .mappings([mapping])
        .with_target(target)
    )
