"""What rule files ask: Prometheus' own, as they are or in a PrometheusRule of Kubernetes, and those
that Grafana manages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsagent.dashboards.doctor.findings import Asked, one_line

MOST_RULES = 10_000


def is_rules(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(_groups(document), list)


def _groups(document: dict[str, Any]) -> Any:
    spec = document.get("spec") if document.get("kind") == "PrometheusRule" else document
    return spec.get("groups") if isinstance(spec, dict) else None


def asked(document: dict[str, Any]) -> list[Asked]:
    """The expression of every rule, in the file's order."""
    found: list[Asked] = []
    for group in _groups(document):
        rules = group.get("rules") if isinstance(group, dict) else None
        for rule in rules if isinstance(rules, list) else ():
            if isinstance(rule, dict):
                found += _asked(rule)
            if len(found) >= MOST_RULES:
                return found
    return found


def recorded(document: dict[str, Any]) -> set[str]:
    """The names that recording rules make."""
    return {
        rule["record"]
        for group in _groups(document)
        if isinstance(group, dict) and isinstance(group.get("rules"), list)
        for rule in group["rules"]
        if isinstance(rule, dict) and isinstance(rule.get("record"), str)
    }


def _asked(rule: dict[str, Any]) -> Iterator[Asked]:
    name = rule.get("alert") or rule.get("record") or rule.get("title") or rule.get("uid")
    where = one_line(name or "a rule without a name", 80)
    if isinstance(rule.get("expr"), str):
        yield Asked(where, rule["expr"], {})
    data = rule.get("data")
    for query in data if isinstance(data, list) else ():
        if not isinstance(query, dict) or query.get("datasourceUid") == "__expr__":
            continue
        model = query.get("model")
        if isinstance(model, dict) and isinstance(model.get("expr"), str):
            yield Asked(where, model["expr"], {})
