"""What the sidecar says of itself, beside what it says of each engine."""

from __future__ import annotations

from dsagent.agent.metrics.metric import Metric

SIDECAR_ENGINES = Metric(
    "dsagent.sidecar.engines",
    "gauge",
    "{engine}",
    "Engines that the sidecar knows, by what it does with them: watching, attaching, ending, or "
    "waiting to try again.",
    ("state",),
)
SIDECAR_RESTARTS = Metric(
    "dsagent.sidecar.restarts",
    "counter",
    "{restart}",
    "How often an engine has come again after it had gone.",
)
SIDECAR_SETTINGS_READ = Metric(
    "dsagent.sidecar.settings.read",
    "counter",
    "{reading}",
    "Readings of the settings file, by what came of them: taken or refused.",
    ("result",),
)
SIDECAR_SETTINGS_STALE = Metric(
    "dsagent.sidecar.settings.stale",
    "gauge",
    "1",
    "1 while the last settings file was refused, and what was before holds.",
)
SIDECAR_MEMORY_USAGE = Metric(
    "dsagent.sidecar.memory.usage", "gauge", "By", "Memory that counts against the limit."
)
SIDECAR_MEMORY_LIMIT = Metric(
    "dsagent.sidecar.memory.limit", "gauge", "By", "The limit: --max-memory, or the container's."
)
SIDECAR_MEMORY_RELIEF = Metric(
    "dsagent.sidecar.memory.relief",
    "gauge",
    "{level}",
    "How much was given up to stay below the limit: 0 for nothing, up to 3.",
)

SIDECAR_METRICS = (
    SIDECAR_ENGINES,
    SIDECAR_RESTARTS,
    SIDECAR_SETTINGS_READ,
    SIDECAR_SETTINGS_STALE,
    SIDECAR_MEMORY_USAGE,
    SIDECAR_MEMORY_LIMIT,
    SIDECAR_MEMORY_RELIEF,
)
