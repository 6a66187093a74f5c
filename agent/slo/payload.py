"""Alerts as Alertmanager's web hook says them (version 4), so that what receives those receives
ours too. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from dsagent.agent.attribution.account import culprit_json
from dsagent.agent.facts import ClockAnchor
from dsagent.agent.host.procfs import escape
from dsagent.agent.slo.alert import Alert, culprits_text
from dsagent.agent.slo.cache import CircuitChange

RECEIVER = "dsagent"
NO_END = "0001-01-01T00:00:00Z"
MAX_TEXT = 1000


def webhook_body(alert: Alert, anchor: ClockAnchor, instance: Mapping[str, str]) -> dict[str, Any]:
    """One alert as one document. `instance`: labels that say which server it is about."""
    labels = {
        "alertname": alert.name,
        **{name: escape(value, limit=MAX_TEXT) for name, value in instance.items()},
        **{name: escape(value, limit=MAX_TEXT) for name, value in alert.labels.items()},
    }
    annotations = {
        "summary": escape(alert.summary, limit=MAX_TEXT),
        "state": alert.state,
        **alert.figures,
    }
    explanation = alert.explanation
    if explanation.causes:
        annotations["top_cause"] = escape(explanation.causes[0][0], limit=MAX_TEXT)
        annotations["causes"] = ", ".join(
            f"{share:.3f} {escape(cause)}" for cause, share in explanation.causes
        )
    if explanation.culprits:
        annotations["culprits"] = escape(culprits_text(explanation.culprits), limit=MAX_TEXT)
    if explanation.exemplars:
        annotations["trace_ids"] = ", ".join(explanation.exemplars)
    annotations["runbook_url"] = f"docs/runbooks/{runbook_of(alert)}.md"
    body = {
        "status": alert.status,
        "labels": labels,
        "annotations": annotations,
        "startsAt": rfc3339(anchor.unix(alert.since_ns)),
        "endsAt": rfc3339(anchor.unix(alert.now_ns)) if alert.status == "resolved" else NO_END,
        "generatorURL": "",
        "fingerprint": fingerprint(labels),
        # Beyond Alertmanager's own keys: the same as the annotations, for programs.
        "dsagent": {
            "state": alert.state,
            "causes": [
                {"cause": cause, "ratio": round(share, 4)} for cause, share in explanation.causes
            ],
            "culprits": [
                {"cause": cause, **culprit_json(culprit)} for cause, culprit in explanation.culprits
            ],
            "trace_ids": list(explanation.exemplars),
            "violators": explanation.violators,
        },
    }
    return {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="{alert.name}"}}',
        "truncatedAlerts": 0,
        "status": alert.status,
        "receiver": RECEIVER,
        "groupLabels": {"alertname": alert.name},
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": "",
        "alerts": [body],
    }


def action_body(change: CircuitChange, anchor: ClockAnchor) -> dict[str, Any]:
    """What a cache alert's own web hook or command is told."""
    return {
        "action": change.alert.action,
        "circuit": "open" if change.is_open else "closed",
        "cache_name": change.alert.name,
        "hit_ratio": round(change.hit_ratio, 4),
        "below_ratio": change.alert.below_ratio,
        "for_s": change.alert.for_s,
        "since": rfc3339(anchor.unix(change.since_ns)),
    }


def runbook_of(alert: Alert) -> str:
    if "objective" in alert.labels:
        return f"slo-{alert.labels['objective']}"
    return "cache-hit-ratio" if "cache_name" in alert.labels else "blind"


def fingerprint(labels: Mapping[str, str]) -> str:
    """Alike for the same labels, from firing to resolved."""
    text = "\0".join(f"{name}\0{value}" for name, value in sorted(labels.items()))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def rfc3339(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
