"""The settings of the sidecar, checked, and what becomes of a change while it runs. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.listening.admission import ListenOptions
from dsagent.agent.probes import Tier
from dsagent.agent.session.outlets import OutletOptions
from dsagent.agent.slo import SloFile

MAX_ENGINES = 8


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """How each engine is watched. A change is taken by attaching anew. `slo`: what the file said
    when the settings were read; a wrong one that comes later changes nothing."""

    outlets: OutletOptions = field(default_factory=OutletOptions)
    slo: SloFile | None = None
    max_overhead_ratio: float = 0.01
    tier: Tier = "default"
    without: frozenset[str] = frozenset()
    has_anomalies: bool = False


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """`listen`, `otlp_receive`, `otlp_receive_grpc`: HOST:PORT, None for nothing. `allow_inject`
    comes from the settings file only."""

    attach: AttachOptions = field(default_factory=AttachOptions)
    match: re.Pattern[str] | None = None
    max_engines: int = MAX_ENGINES
    max_memory_bytes: int | None = None
    allow_inject: bool = False
    listen: str | None = None
    otlp_receive: str | None = None
    otlp_receive_grpc: str | None = None
    guarded_by: ListenOptions = field(default_factory=ListenOptions)
    as_json: bool = False


# What is bound or opened once. It stays as it was until the sidecar starts anew.
NEEDS_RESTART = {
    "listen": "listen",
    "otlp_receive": "otlp_receive",
    "otlp_receive_grpc": "otlp_receive_grpc",
    "max_engines": "max_engines",  # what is on disk is shared by so many
    "guarded_by": "listen_token_file, listen_tls_cert, listen_tls_key, listen_open",
    "as_json": "json",
}


def needing_restart(old: SidecarOptions, new: SidecarOptions) -> tuple[str, ...]:
    """The settings that have changed and cannot change now, as the file names them."""
    return tuple(
        name
        for attribute, name in NEEDS_RESTART.items()
        if getattr(old, attribute) != getattr(new, attribute)
    )


def pattern(text: str | None) -> re.Pattern[str] | None:
    """Of `--match`. Raises DsagentError (exit 2)."""
    if not text:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        message = f"--match {text!r} is no regular expression: {error}"
        raise DsagentError(message, exit_code=USAGE) from error
