"""How many time series the agent makes: what to expect, and what is never exceeded. Pure.

A series is what Prometheus counts as one: a number, or one of a histogram's buckets, its sum and
its count.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.metric import Metric

# The budget. Where it is used up, what would be a new series is counted in one of the metric whose
# labels are all `~other`; a new reading of a gauge has no sum, so it is left out and counted.
MAX_SERIES = 20_000

# How many values a label usually has on one server; 1 for what goes with another label, or is
# there once. 0: most servers do not have it at all. Each has at most catalog.MAX_LABEL_VALUES.
USUAL_VALUES: Mapping[str, int] = {
    "gen_ai.operation.name": 1,
    "gen_ai.provider.name": 1,
    "gen_ai.request.model": 1,
    "error.type": 2,
    "gen_ai.token.type": 2,
    "outcome": 3,
    "partial": 2,
    "cause": 32,
    "how": 1,
    "slo": 1,
    "objective": 5,
    "tenant": 4,
    "prompt_class": 1,
    "window": 2,
    "state": 4,
    "cache_name": 1,
    "action": 1,
    "phase": 3,
    "batch": 6,
    "context": 5,
    "part": 6,
    "kind": 8,
    "source": 6,
    "sink": 3,
    "reason": 3,
    "event": 8,
    "hw.id": 1,  # for each device, see estimate()
    "hw.type": 1,
    "hw.name": 1,
    "hw.vendor": 1,
    "hw.driver_version": 1,
    "clock": 3,
    "process.executable.name": 3,
    "cpu.mode": 4,
    "system.paging.fault.type": 2,
    "process.context_switch.type": 2,
    "disk.io.direction": 2,
    "protocol": 0,
    "code": 2,
    "of": 0,
    "figure": 0,
    "agrees": 2,
    "layer": 0,
    "position": 0,
    "result": 2,
    "feature": 5,
    **dict.fromkeys(catalog.TARGET_INFO.attributes, 1),
}
# Where a label means something else on one metric, or what it counts is seldom: combinations.
USUAL_COMBINATIONS: Mapping[str, int] = {
    catalog.KERNEL_DELAY.name: 5,  # kinds of delay
    catalog.SINK_MADE.name: 3,  # traces, metrics, logs of one sink
    catalog.SINK_QUEUED.name: 3,
    catalog.SINK_LOST.name: 0,  # nothing is, where all is well
}
_SLO_PREFIX = "dsagent.slo."
_ANOMALY_PREFIX = "dsagent.anomaly."


def series_of(metric: Metric, bounds: int | None = None) -> int:
    """Of one combination of labels; `bounds`: their number, where limits have added some."""
    if metric.kind != "histogram":
        return 1
    return (len(metric.bounds) if bounds is None else bounds) + 3  # +Inf, sum and count


def estimate(devices: int, *, has_slo: bool, has_anomalies: bool = False) -> int:
    """The series to be expected of one server with so many GPUs."""
    total = 0
    for metric in catalog.CATALOGUE:
        if metric in catalog.ENGINE_METRICS:
            continue  # the engine shows its own
        if metric.name.startswith(_SLO_PREFIX) and not has_slo:
            continue
        if metric.name.startswith(_ANOMALY_PREFIX) and not has_anomalies:
            continue
        combinations = USUAL_COMBINATIONS.get(
            metric.name, prod(USUAL_VALUES.get(label, 1) for label in metric.attributes)
        )
        if metric in catalog.GPU_METRICS:
            combinations *= devices
        total += combinations * series_of(metric)
    return min(total, MAX_SERIES)
