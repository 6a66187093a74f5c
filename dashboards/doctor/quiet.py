"""Why a metric of ours may rightly not be there: nothing of its kind has happened, or nobody can
look. Anything else that is missing is a fault."""

from __future__ import annotations

from collections.abc import Mapping

from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.catalog import Metric
from dsagent.dashboards.doctor.known import Known

# Shown once it has happened.
_EVENTS = (
    catalog.PREEMPTIONS,
    catalog.EVENTS,
    catalog.SAMPLES_UNKNOWN,
    catalog.SERIES_OVERFLOWED,
    catalog.GPU_ERRORS,
)
_LEDGER = (catalog.SINK_MADE, catalog.SINK_QUEUED, catalog.SINK_LOST)
_WHEN = (
    (_EVENTS, "it has not happened yet"),
    (
        (catalog.KV_BLOCKS_USED, catalog.KV_BLOCKS_LIMIT),
        "the engine does not tell of its KV blocks",
    ),
    (catalog.ANOMALY_METRICS, "the agent does not watch for anomalies (--anomalies)"),
    (_LEDGER, "the agent has no sink that keeps a ledger (--otlp-endpoint)"),
)
# Made by a server of itself, where there is something to tell.
_OF_SERVERS = ("ALERTS", "ALERTS_FOR_STATE", "up")
# By the source that brings it; why it may be missing although that source is well.
_BY_SOURCE: tuple[tuple[str, tuple[Metric, ...], str], ...] = (
    ("nvml", catalog.GPU_METRICS, ""),
    ("kernel", catalog.KERNEL_METRICS, ""),
    ("proc", (catalog.CGROUP_CPU_THROTTLED,), "the target's cgroup has no quota"),
    ("served", catalog.SERVED_METRICS, "the engine shows no such figure of its own"),
    ("experts", catalog.TALLY_METRICS, "the model has no experts, or makes no drafts"),
    ("otlp", catalog.ENGINE_SPAN_METRICS, "no spans of the engine's own have come"),
)


def series_of(metric: Metric) -> tuple[str, ...]:
    if metric.kind == "histogram":
        return tuple(f"{metric.prometheus}{end}" for end in ("_bucket", "_sum", "_count"))
    return (metric.prometheus,)


_OF_ENGINE = frozenset(name for metric in catalog.ENGINE_METRICS for name in series_of(metric))
OURS = {name: metric for metric in catalog.CATALOGUE for name in series_of(metric)}


def may_have(series: str) -> frozenset[str]:
    """Labels that a series of ours may have though none has them now, such as a tenant."""
    metric = OURS.get(series)
    return (
        frozenset(name.replace(".", "_") for name in metric.attributes) if metric else frozenset()
    )


def excuse(series: str, known: Known) -> str | None:
    """Why a series of ours is not there; None where there is no excuse, or no agent to ask."""
    if series in _OF_SERVERS:
        return "the server makes it, where there is something to tell"
    metric = OURS.get(series)
    states = {
        sample.labels.get("source", ""): sample.labels.get("state", "")
        for sample in known.samples(catalog.SOURCE_STATE.prometheus)
        if sample.value == 1
    }
    if metric is None or not states:
        return None
    if metric in catalog.SLO_METRICS:
        return _of_objectives(metric, known)
    if metric in catalog.ENGINE_METRICS and known.names().isdisjoint(_OF_ENGINE):
        return "the bundled engine shows it, and its /metrics is not scraped here"
    for metrics, reason in _WHEN:
        if metric in metrics:
            return reason
    return _of_sources(metric, states)


def _of_sources(metric: Metric, states: Mapping[str, str]) -> str | None:
    for source, metrics, reason in _BY_SOURCE:
        if metric in metrics:
            state = states.get(source)
            if state == "ok":
                return reason or None
            return f"the source {source} is {state}" if state else f"there is no source {source}"
    return None


def _of_objectives(metric: Metric, known: Known) -> str | None:
    if not known.samples(catalog.SLO_BLIND.prometheus):
        return "the agent has no SLO file (--slo)"
    if metric in (catalog.CACHE_CIRCUIT, catalog.CACHE_HIT_RATIO):
        return "the SLO file has no cache alert, or nothing was looked up"
    if metric is catalog.SLO_BURNT:
        return "no budget has burnt yet"
    return None if known.samples(catalog.SLO_EVENTS.prometheus) else "no request was judged yet"
