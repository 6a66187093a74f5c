"""Why a metric of ours may rightly not be there: nothing of its kind has happened, or nobody can
look. Anything else that is missing is a fault."""

from __future__ import annotations

from dsagent.agent import catalog
from dsagent.agent.catalog import Metric
from dsagent.dashboards.doctor.known import Known

# Shown once it has happened.
_EVENTS = (catalog.PREEMPTIONS, catalog.EVENTS, catalog.SAMPLES_UNKNOWN, catalog.GPU_ERRORS)
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


OURS = {name: metric for metric in catalog.CATALOGUE for name in series_of(metric)}


def excuse(series: str, known: Known) -> str | None:
    """Why a series of ours is not there; None where there is no excuse, or no agent to ask."""
    metric = OURS.get(series)
    states = {
        sample.labels.get("source", ""): sample.labels.get("state", "")
        for sample in known.samples(catalog.SOURCE_STATE.prometheus)
        if sample.value == 1
    }
    if metric is None or not states:
        return None
    if metric in _EVENTS:
        return "it has not happened yet"
    for source, metrics, reason in _BY_SOURCE:
        if metric in metrics:
            state = states.get(source)
            if state is None:
                return f"the agent has no source {source} here"
            return reason or None if state == "ok" else f"the source {source} is {state}"
    return None
