"""The same alerts as rules that Grafana evaluates itself: a provisioning file.

Grafana keeps a rule's last state while there is no data, so these need no
memory of their own: the query has a value, 0 or 1, only where there are
enough requests to judge by.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from dsagent.agent.metrics.slo_metrics import SLO_BAD, SLO_BLIND, SLO_EVENTS
from dsagent.agent.slo.alert import BLIND, BURN, CACHE, OBJECTIVE_TEXT
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Limit, Objective
from dsagent.agent.slo.policy import (
    MAX_DEVIATIONS,
    MIN_BAD,
    MIN_EVENTS,
    BurnWindow,
    budget_ratio,
    windows,
)
from dsagent.dashboards.rules_names import duration, number
from dsagent.dashboards.rules_prometheus import (
    BY,
    EVALUATE_S,
    EXTRAPOLATED,
    RECOVERY_EVENTS,
    groups,
    selector,
)

# Grafana replaces variables in provisioning files; data sources have no uid that is known here.
DATASOURCE = "$DSAGENT_PROMETHEUS_UID"
FOLDER = "dsagent"

Rule = dict[str, Any]


def document(file: SloFile) -> dict[str, Any]:
    every = duration(max(10.0, EVALUATE_S / file.windows_divided_by))
    divided_by = file.windows_divided_by
    burns = [
        _burn(limit, objective, ratio, window)
        for limit in file.limits.entries
        for objective, ratio in limit.objectives.items()
        for window in windows(divided_by)
    ]
    others = list(_others(file))
    return {
        "apiVersion": 1,
        "groups": [
            {"orgId": 1, "name": name, "folder": FOLDER, "interval": every, "rules": rules}
            for name, rules in (("dsagent-slo", burns), ("dsagent", others))
        ],
    }


def _burn(limit: Limit, objective: Objective, ratio: float, window: BurnWindow) -> Rule:
    what = OBJECTIVE_TEXT[objective]
    labels = {
        "slo": limit.label,
        "objective": objective,
        "severity": window.severity,
        "window": duration(window.long_s),
    }
    return _rule(
        f"{BURN} {limit.label} {objective} {duration(window.long_s)}",
        _burning(limit, objective, ratio, window),
        round(window.long_s),
        "0s",
        labels,
        {
            "summary": f"{limit.label}, {what}: too many bad requests over "
            f"{duration(window.long_s)} and {duration(window.short_s)}",
            "runbook_url": f"docs/runbooks/slo-{objective}.md",
        },
        no_data="KeepLast",
    )


def _burning(limit: Limit, objective: Objective, ratio: float, window: BurnWindow) -> str:
    """1 where it burns, 0 where it does not, nothing where too few requests came lately."""
    where = selector(limit, objective)
    budget = budget_ratio(ratio)
    threshold = number(window.threshold_ratio(budget))

    def over(seconds: float) -> tuple[str, str]:
        bad, events = (
            f"sum {BY} (increase({metric.prometheus}{where}[{duration(seconds)}]))"
            for metric in (SLO_BAD, SLO_EVENTS)
        )
        return bad, events

    (bad, events), (recent_bad, recent) = over(window.long_s), over(window.short_s)
    evidence = f"{bad} - {number(budget)} * {events}"
    spread = f"{MAX_DEVIATIONS} * sqrt({number(budget * (1 - budget))} * {events})"
    return (
        f"({recent_bad} / ({recent} >= {RECOVERY_EVENTS}) > bool {threshold})"
        f"\n* ({bad} / ({events} > 0) > bool {threshold})"
        f"\n* ({events} >= bool {MIN_EVENTS})"
        f"\n* ({bad} > bool {max(MIN_BAD, EXTRAPOLATED)})"
        f"\n* (({evidence}) > bool {spread})"
    )


def _others(file: SloFile) -> Iterator[Rule]:
    """Blindness and the caches, from the rules for Prometheus."""
    metric = SLO_BLIND.prometheus
    for group in groups(file)["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == BLIND:
                # No data at all is what a killed agent leaves behind.
                yield _rule(
                    BLIND,
                    f"max by (instance) ({metric})",
                    60,
                    rule["for"],
                    rule["labels"],
                    rule["annotations"],
                    no_data="Alerting",
                )
            elif rule.get("alert") == CACHE:
                expr, _, threshold = rule["expr"].rpartition(" < ")
                yield _rule(
                    f"{CACHE} {rule['labels']['action']}",
                    f"({expr}) < bool {threshold}",
                    600,
                    rule["for"],
                    rule["labels"],
                    rule["annotations"],
                    no_data="KeepLast",
                )


def _rule(
    title: str,
    expr: str,
    from_s: int,
    for_: str,
    labels: dict[str, str],
    annotations: dict[str, str],
    *,
    no_data: str,
) -> Rule:
    """`expr` is 1 where it alarms. A rule's uid is its own: it follows from its title."""
    return {
        "uid": "dsagent-" + hashlib.blake2b(title.encode(), digest_size=8).hexdigest(),
        "title": title,
        "condition": "B",
        "for": for_,
        "noDataState": no_data,
        "execErrState": "KeepLast",
        "labels": {name: _escaped(text) for name, text in labels.items()},
        "annotations": {name: _escaped(text) for name, text in annotations.items()},
        "data": [
            {
                "refId": "A",
                "relativeTimeRange": {"from": max(from_s, 1), "to": 0},
                "datasourceUid": DATASOURCE,
                "model": {
                    "refId": "A",
                    "expr": _escaped(expr),
                    "instant": True,
                    "range": False,
                },
            },
            {
                "refId": "B",
                "datasourceUid": "__expr__",
                "model": {
                    "refId": "B",
                    "type": "threshold",
                    "expression": "A",
                    "conditions": [{"evaluator": {"type": "gt", "params": [0]}}],
                },
            },
        ],
    }


def _escaped(text: str) -> str:
    """A dollar of ours is no variable of Grafana's provisioning."""
    return text.replace("$", "$$")
