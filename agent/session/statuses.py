"""How sources and sinks did, as it stands in documents."""

from __future__ import annotations

from typing import Any

from dsagent.agent.facts import SourceStatus
from dsagent.agent.sinks.base import SinkStatus


def source_json(status: SourceStatus) -> dict[str, Any]:
    return {
        "name": status.name,
        "state": status.state,
        "reason": status.reason,
        "dropped": status.dropped,
        "cost_ns": status.cost_ns,
    }


def sink_json(status: SinkStatus) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": status.name,
        "sent": status.sent,
        "acknowledged": status.acknowledged,
        "failed": status.failed,
        "dropped": status.dropped,
        "reason": status.reason,
    }
    if status.made is not None:
        document |= {
            "made": status.made,
            "recovered": status.recovered,
            "queued": status.queued,
            "lost": dict(status.lost),
            "parts": [sink_json(part) for part in status.parts],
        }
    return document
