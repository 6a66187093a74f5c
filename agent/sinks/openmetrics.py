"""Families of metrics as text: OpenMetrics with exemplars, or the classic Prometheus format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from dsagent.agent.metrics.metric import Metric, prometheus_label
from dsagent.agent.metrics.series import Exemplar, Family, HistogramPoint, Labels

OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
CLASSIC_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(families: Iterable[Family], *, openmetrics: bool) -> str:
    """The whole body of a scrape."""
    lines = [line for family in families for line in _family(family, openmetrics)]
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _family(family: Family, openmetrics: bool) -> Iterator[str]:
    metric = family.metric
    # Classic text names a counter's family with its suffix, OpenMetrics without.
    name = metric.prometheus_family if openmetrics else metric.prometheus
    yield f"# HELP {name} {_escape(metric.description)}"
    yield f"# TYPE {name} {metric.kind}"
    if openmetrics and metric.prometheus_unit:
        yield f"# UNIT {name} {metric.prometheus_unit}"
    series = metric.prometheus
    for number in family.numbers:
        yield f"{series}{_braced(_pairs(number.labels))} {_number(number.value)}"
    for point in family.histograms:
        yield from _histogram(metric, point, openmetrics)


def _histogram(metric: Metric, point: HistogramPoint, openmetrics: bool) -> Iterator[str]:
    total, name, pairs = 0, metric.prometheus, _pairs(point.labels)
    before = f"{pairs}," if pairs else ""
    for bound, count, exemplar in zip(
        (*point.bounds, math.inf), point.counts, point.exemplars, strict=True
    ):
        total += count
        tail = f" {_exemplar(exemplar)}" if openmetrics and exemplar is not None else ""
        yield f'{name}_bucket{{{before}le="{_number(bound)}"}} {total}{tail}'
    yield f"{name}_sum{_braced(pairs)} {_number(point.sum)}"
    yield f"{name}_count{_braced(pairs)} {total}"


def _exemplar(exemplar: Exemplar) -> str:
    ids = f'trace_id="{exemplar.trace_id:032x}",span_id="{exemplar.span_id:016x}"'
    return f"# {{{ids}}} {_number(exemplar.value)} {exemplar.unix_ns / 1e9:.3f}"


def _pairs(labels: Labels) -> str:
    return ",".join([f'{prometheus_label(name)}="{_escape(value)}"' for name, value in labels])


def _braced(pairs: str) -> str:
    return f"{{{pairs}}}" if pairs else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
