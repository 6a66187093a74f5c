"""What the agent says of its target and of itself: sources, sinks, losses, cost."""

from __future__ import annotations

from dsagent.agent.metrics.metric import Metric
from dsagent.instrumentation import names

# To Prometheus only: OTLP has the same as its resource. No pid: it would multiply the series.
TARGET_INFO = Metric(
    "target_info",
    "gauge",
    "{target}",
    "1; what the agent is attached to.",
    (
        names.SERVICE_NAME,
        "service.namespace",
        "service.version",
        names.SERVICE_INSTANCE_ID,
        "deployment.environment.name",
        "container.id",
        "k8s.namespace.name",
        "k8s.pod.name",
        "k8s.pod.uid",
    ),
)

SOURCE_STATE = Metric(
    "dsagent.source.state",
    "gauge",
    "{state}",
    "1 for the state a source is in: ok, unavailable, lagging or failed.",
    ("source", "state"),
)
SOURCE_DROPPED = Metric(
    "dsagent.source.dropped", "counter", "{record}", "Records a source lost, counted.", ("source",)
)
SOURCE_LAG = Metric("dsagent.source.lag", "gauge", "s", "How far a source is behind.", ("source",))
SOURCE_COST = Metric(
    "dsagent.source.cost", "counter", "s", "CPU time spent by a source.", ("source",)
)
SINK_SENT = Metric(
    "dsagent.sink.sent", "counter", "{item}", "Items a sink handed to its back end.", ("sink",)
)
SINK_ACKNOWLEDGED = Metric(
    "dsagent.sink.acknowledged",
    "counter",
    "{item}",
    "Items that the back end said it took.",
    ("sink",),
)
SINK_FAILED = Metric(
    "dsagent.sink.failed",
    "counter",
    "{item}",
    "Items sent that the back end refused or did not answer for.",
    ("sink",),
)
SINK_DROPPED = Metric(
    "dsagent.sink.dropped", "counter", "{item}", "Items given up before sending.", ("sink",)
)
SINK_MADE = Metric(
    "dsagent.sink.made",
    "counter",
    "{item}",
    "Items made for a sink's back end, with those an earlier run left on disk; each is queued, "
    "sent or dropped.",
    ("sink", "kind"),
)
SINK_QUEUED = Metric(
    "dsagent.sink.queued",
    "gauge",
    "{item}",
    "Items that wait for a sink's back end, or for its answer.",
    ("sink", "kind"),
)
SINK_LOST = Metric(
    "dsagent.sink.lost",
    "counter",
    "{item}",
    "Items that did not arrive, by why: those failed and those dropped.",
    ("sink", "kind", "reason"),
)
UNCOUNTED_LOSSES = Metric(
    "dsagent.uncounted_losses",
    "gauge",
    "{record}",
    "Records written and neither read nor counted as lost: must be 0.",
)
EVENTS = Metric(
    "dsagent.events",
    "counter",
    "{event}",
    "Rare events: a stalled loop, a source lost, a child that came or went.",
    ("event",),
)
SAMPLES_UNKNOWN = Metric(
    "dsagent.samples.unknown",
    "counter",
    "{sample}",
    "Samples whose name or attributes are not in the catalogue, left out.",
)
SERIES_OVERFLOWED = Metric(
    "dsagent.series.overflowed",
    "counter",
    "{update}",
    "Updates that found the budget of series used up: they are in ~other, gauges are left out.",
)
CLOCK_ERROR = Metric(
    "dsagent.clock.error", "gauge", "s", "Bound on the error between monotonic and wall clock."
)
AGENT_CPU = Metric("dsagent.agent.cpu.time", "counter", "s", "CPU time the agent itself used.")
AGENT_PSS = Metric(
    "dsagent.agent.memory.pss", "gauge", "By", "Memory of the agent and its children (PSS)."
)
AGENT_OVERHEAD = Metric(
    "dsagent.agent.overhead", "gauge", "1", "The agent's cost to the target, as it knows it."
)

AGENT_METRICS = (
    TARGET_INFO,
    SOURCE_STATE,
    SOURCE_DROPPED,
    SOURCE_LAG,
    SOURCE_COST,
    SINK_SENT,
    SINK_ACKNOWLEDGED,
    SINK_FAILED,
    SINK_DROPPED,
    SINK_MADE,
    SINK_QUEUED,
    SINK_LOST,
    UNCOUNTED_LOSSES,
    EVENTS,
    SAMPLES_UNKNOWN,
    SERIES_OVERFLOWED,
    CLOCK_ERROR,
    AGENT_CPU,
    AGENT_PSS,
    AGENT_OVERHEAD,
)
