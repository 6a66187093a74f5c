"""What a session says of itself: while it runs (`status`) and when it has ended (`attach`)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsagent.agent.facts import SourceStatus, Target
from dsagent.agent.host import procfs
from dsagent.agent.session.feeds import Feeds
from dsagent.agent.session.overhead import OverheadMeter
from dsagent.agent.session.statuses import sink_json, source_json
from dsagent.agent.sinks.base import SinkStatus


@dataclass(slots=True)
class Counts:
    """What has passed through, since attaching."""

    steps: int = 0
    shares: int = 0
    tokens: int = 0  # handed out by these steps
    requests: int = 0  # that ended after attaching


@dataclass(frozen=True, slots=True)
class Live:
    """What a progress line shows."""

    elapsed_s: float
    counts: Counts
    sources: tuple[SourceStatus, ...]
    overhead_ratio: float


def summary(
    target: Target,
    counts: Counts,
    feeds: Feeds,
    overhead: OverheadMeter,
    sinks: Sequence[SinkStatus],
    *,
    duration_ns: int,
    accounting_failures: int,
    clock_error_ns: int,
    pss_bytes: int | None,
) -> dict[str, Any]:
    """The document of `attach`."""
    return {
        "target": {
            **asdict(target),
            "children": list(target.children),
            "gpu_uuids": list(target.gpu_uuids),
        },
        "engine": target.engine,
        "duration_ns": duration_ns,
        "steps": counts.steps,
        "requests": counts.requests,
        "sources": [source_json(status) for status in feeds.statuses()],
        "uncounted_losses": feeds.steps.uncounted_losses,
        "accounting_failures": accounting_failures,
        "clock_error_ns": clock_error_ns,
        "sinks": [sink_json(status) for status in sinks],
        "overhead": {
            "ratio": overhead.ratio,
            "agent_cpu_ratio": overhead.agent_cpu_ratio,
            "agent_pss_bytes": pss_bytes,
        },
    }


def engine_status(
    target: Target,
    counts: Counts,
    feeds: Feeds,
    overhead: OverheadMeter,
    sinks: Sequence[SinkStatus],
    *,
    model: str | None,
    attached_unix_ns: int,
    accounting_failures: int,
) -> dict[str, Any]:
    """One engine of the document of `status`."""
    window = overhead.window
    return {
        "pid": target.pid,
        "start_ticks": target.start_ticks,
        "pid_namespace": target.pid_namespace,
        "command": target.comm,
        "kind": target.engine,
        "model": None if model is None else procfs.escape(model),
        "way_in": "outside" if target.engine == "http" else "rings",
        "state": "watching",
        "reason": "",
        "attached_unix_ns": attached_unix_ns,
        "requests": counts.requests,
        "steps": counts.steps,
        "uncounted_losses": feeds.steps.uncounted_losses,
        "accounting_failures": accounting_failures,
        "sources": [source_json(status) for status in feeds.statuses()],
        "sinks": [sink_json(status) for status in sinks],
        "overhead_ratio": None if window is None else window.ratio,
    }


def agent_status(mode: str) -> dict[str, Any]:
    """What the document of `status` says of the agent itself. `mode`: attach or sidecar."""
    stat = procfs.read_stat(os.getpid())
    now_unix_ns = time.time_ns()
    age_ns = round(procfs.age_s(stat.start_ticks) * 1e9)
    return {
        "mode": mode,
        "pid": os.getpid(),
        "since_unix_ns": now_unix_ns - age_ns,
        "now_unix_ns": now_unix_ns,
        "cpu_ns": time.process_time_ns(),
        "rss_bytes": stat.rss_bytes,
    }
