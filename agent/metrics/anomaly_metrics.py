"""What the watch for anomalies found (anomalies/)."""

from __future__ import annotations

from dsagent.agent.metrics.metric import Metric

ANOMALY_FINDINGS = Metric(
    "dsagent.anomaly.findings",
    "counter",
    "{finding}",
    "Episodes in which this feature of steps, or of requests, stayed above what is usual.",
    ("kind", "feature"),
)
ANOMALY_ACTIVE = Metric(
    "dsagent.anomaly.active",
    "gauge",
    "{state}",
    "1 while such an episode lasts.",
    ("kind",),
)

ANOMALY_METRICS = (ANOMALY_FINDINGS, ANOMALY_ACTIVE)
