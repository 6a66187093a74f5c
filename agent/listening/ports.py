"""The ports that the agent listens on unless told otherwise: the one place where they stand.

Manifests and documents are tested against these.
"""

from __future__ import annotations

METRICS = 9464  # /metrics, /healthz, /readyz: what OpenTelemetry gives its Prometheus exporters
OTLP_HTTP = 4318
OTLP_GRPC = 4317

LOOPBACK = "127.0.0.1"


def on_loopback(port: int) -> str:
    return f"{LOOPBACK}:{port}"
