"""What an agent will send, as it says at its start: before it has sent anything."""

from __future__ import annotations

from dsagent.agent.fleet.measured import expected_line
from dsagent.agent.metrics.cardinality import MAX_SERIES, estimate


def expected_lines(
    *,
    has_metrics: bool,
    has_otlp: bool,
    devices: int = 0,
    has_slo: bool = False,
    has_anomalies: bool = False,
) -> list[str]:
    """Of one engine with so many GPUs. `has_metrics`: somebody scrapes them or is sent them.
    Series are computed from the catalogue, spans and bytes are those that were measured."""
    lines = []
    if has_metrics:
        series = estimate(devices, has_slo=has_slo, has_anomalies=has_anomalies)
        lines.append(
            f"metrics: about {series} time series, at most {MAX_SERIES}, beyond that ~other"
        )
    if has_otlp:
        lines.append(expected_line())
    return lines
