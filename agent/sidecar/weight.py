"""What the sidecar will send for each engine that it finds, as it says at its start. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dsagent.agent.errors import DsagentError
from dsagent.agent.session.expected import expected_lines
from dsagent.agent.sidecar.options import SidecarOptions
from dsagent.agent.sinks.otlp_config import otlp_config


def weight(options: SidecarOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """A line by what it is about: metrics, traces. Nothing where nobody gets anything. GPUs are not
    known yet: each has its own series on top."""
    outlets = options.attach.outlets
    try:
        otlp = otlp_config(environ, outlets.otlp_endpoint, outlets.otlp_protocol)
    except DsagentError:
        otlp = None  # which each watch says itself, and does not begin
    lines = expected_lines(
        has_metrics=bool(options.listen or outlets.remote_write or otlp),
        has_otlp=otlp is not None,
        has_slo=options.attach.slo is not None,
        has_anomalies=options.attach.has_anomalies,
    )
    return {line.partition(":")[0]: f"of each engine: {line}" for line in lines}
