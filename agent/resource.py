"""What telemetry is about: the resource attributes of a target, with what people set for it."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.facts import Target
from dsagent.instrumentation import names

# The namespace that the conventions give for service.instance.id made of other ids.
_INSTANCE_NAMESPACE = uuid.UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_ATTRIBUTES = 64


def resource_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, which wins. DsagentError if malformed."""
    attributes: dict[str, str] = {}
    for pair in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        if not pair.strip():
            continue
        key, separator, value = pair.partition("=")
        if not separator or not key.strip() or len(attributes) >= MAX_ATTRIBUTES:
            raise DsagentError(
                f"OTEL_RESOURCE_ATTRIBUTES: {pair[:60]!r} is not key=value", exit_code=USAGE
            )
        attributes[unquote(key.strip())] = unquote(value.strip())
    name = environ.get("OTEL_SERVICE_NAME", "").strip()
    if name:
        attributes[names.SERVICE_NAME] = name
    return attributes


def resource_attributes(target: Target, overrides: Mapping[str, str]) -> dict[str, str | int]:
    """service.name and service.instance.id are always there; `overrides` win."""
    attributes: dict[str, str | int] = {
        names.SERVICE_NAME: target.service_name,
        names.SERVICE_INSTANCE_ID: _instance_id(target),
        names.PROCESS_PID: target.pid,
        "host.name": socket.gethostname(),
    }
    if target.container_id is not None:
        attributes["container.id"] = target.container_id
    attributes.update(overrides)
    return attributes


def _instance_id(target: Target) -> str:
    """Alike for every agent that attaches to this process, unlike for any other process."""
    try:
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot_id = socket.gethostname()
    return str(uuid.uuid5(_INSTANCE_NAMESPACE, f"{boot_id}/{target.pid}/{target.start_ticks}"))
