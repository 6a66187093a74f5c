"""Prometheus rules of an SLO file: windows recorded once for all series, burn alerts of each entry,
and alerts that say when nothing can be said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.metric import prometheus_label
from dsagent.agent.metrics.slo_metrics import SLO_BAD, SLO_BLIND, SLO_BURNT, SLO_EVENTS
from dsagent.agent.slo.alert import BLIND, BURN, CACHE, OBJECTIVE_TEXT
from dsagent.agent.slo.cache import MIN_LOOKUPS, CacheAlert
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
from dsagent.dashboards import rules_texts
from dsagent.dashboards.rules_names import duration, number, quoted, recorded

NO_DATA = "DsagentSloNotEnoughData"
RECOVERY_EVENTS = 5
EVALUATE_S = 30.0
REMEMBER_S = 6 * 3600.0  # a server that is gone for so long is no alert any more
# One error in a series two scrapes old is extrapolated to two: more than that is evidence.
EXTRAPOLATED = 2
LABELS = tuple(prometheus_label(name) for name in SLO_EVENTS.attributes)
BY = f"by ({', '.join(LABELS)})"
BURNT_BY = (*LABELS, "cause")
ON = f"on ({', '.join(LABELS)})"

Rule = dict[str, Any]


def groups(file: SloFile) -> dict[str, Any]:
    """The document of a rule file."""
    divided_by = file.windows_divided_by
    interval = duration(max(1.0, EVALUATE_S / divided_by))
    found = [
        {"name": "dsagent-slo-windows", "interval": interval, "rules": list(_recorded(divided_by))}
    ]
    for limit in file.limits.entries:
        rules = [
            rule
            for objective, ratio in limit.objectives.items()
            for window in windows(divided_by)
            for rule in _burn(limit, objective, ratio, window, divided_by)
        ]
        found.append({"name": f"dsagent-slo {limit.label}", "interval": interval, "rules": rules})
    seeing = {"name": "dsagent-seeing", "interval": interval, "rules": [_blind(divided_by)]}
    found.append(seeing)
    if file.cache:
        rules = [_cache(alert) for alert in file.cache]
        found.append({"name": "dsagent-cache", "interval": interval, "rules": rules})
    return {"groups": found}


def selector(limit: Limit, objective: Objective) -> str:
    return f"{{slo={quoted(limit.label)}, objective={quoted(objective)}}}"


def _recorded(divided_by: float) -> Iterator[Rule]:
    for seconds in sorted({s for w in windows(divided_by) for s in (w.long_s, w.short_s)}):
        for what, metric in (("events", SLO_EVENTS), ("bad", SLO_BAD)):
            over = f"increase({metric.prometheus}[{duration(seconds)}])"
            yield {"record": recorded(what, seconds), "expr": f"sum {BY} ({over})"}
        events, bad = recorded("events", seconds), recorded("bad", seconds)
        yield {"record": recorded("ratio", seconds), "expr": f"{bad} / ({events} > 0)"}
    for seconds in sorted({window.long_s for window in windows(divided_by)}):
        burnt = SLO_BURNT.prometheus
        # All that there is where a cause is younger than the window, or counts anew: a rate would
        # not see what a series began with.
        over = f"({burnt} - {burnt} offset {duration(seconds)} >= 0 or {burnt})"
        causes, all_causes = (f"sum by ({', '.join(by)}) ({over})" for by in (BURNT_BY, LABELS))
        yield {
            "record": recorded("causes", seconds),
            "expr": f"{causes}\n/ {ON} group_left () ({all_causes} > 0)",
        }


def burning(limit: Limit, objective: Objective, ratio: float, window: BurnWindow) -> str:
    """Both windows above the threshold, the long one by more than chance. The value is the long
    window's ratio of bad requests."""
    where = selector(limit, objective)
    budget = budget_ratio(ratio)
    threshold = number(window.threshold_ratio(budget))
    events = recorded("events", window.long_s) + where
    bad = recorded("bad", window.long_s) + where
    spread = number(budget * (1 - budget))
    return (
        f"{recorded('ratio', window.long_s)}{where} > {threshold}"
        f"\nand {recorded('ratio', window.short_s)}{where} > {threshold}"
        f"\nand {events} >= {MIN_EVENTS}"
        f"\nand {bad} > {max(MIN_BAD, EXTRAPOLATED)}"
        f"\nand ({bad} - {number(budget)} * {events})"
        f" > {MAX_DEVIATIONS} * sqrt({spread} * {events})"
    )


def _burn(
    limit: Limit, objective: Objective, ratio: float, window: BurnWindow, divided_by: float
) -> Iterator[Rule]:
    """The alert, and the one that says that it is only kept. Once it fires it goes on until there
    are enough requests and none of the short window's moments has burnt: recovered is not the same
    as gone, nor as a moment's relief."""
    labels = {
        "slo": limit.label,
        "objective": objective,
        "severity": window.severity,
        "window": duration(window.long_s),
    }
    fired = ", ".join(
        f"{name}={quoted(value)}"
        for name, value in (
            ("alertname", BURN),
            ("alertstate", "firing"),
            *labels.items(),
        )
    )
    where, short = selector(limit, objective), duration(window.short_s)
    threshold = number(window.threshold_ratio(budget_ratio(ratio)))
    remember = duration(max(REMEMBER_S / divided_by, 2 * window.long_s))
    burns = burning(limit, objective, ratio, window)
    fires = f"max {BY} (ALERTS{{{fired}}})"
    enough = f"{recorded('events', window.short_s)}{where} >= {RECOVERY_EVENTS}"
    calm = f"max_over_time({recorded('ratio', window.short_s)}{where}[{short}]) <= {threshold}"
    known = f"count {BY} (last_over_time({SLO_EVENTS.prometheus}{where}[{remember}]))"
    what = OBJECTIVE_TEXT[objective]
    target = f"{number(ratio * 100)} %"
    yield {
        "alert": BURN,
        "expr": f"{burns}\nor {fires} unless {ON} ({enough} and {calm}) and {ON} {known}",
        "labels": labels,
        "annotations": {
            **rules_texts.burn(limit, objective, ratio, window),
            "description": _description(limit, objective, ratio, window, target),
            "runbook_url": f"docs/runbooks/slo-{objective}.md",
        },
    }
    yield {
        "alert": NO_DATA,
        "expr": f"{fires} unless {ON} ({enough}) and {ON} {known}\nunless {ON} ({burns})",
        "labels": {**labels, "severity": "ticket"},
        "annotations": {
            "summary": f"{what}: requests stopped while it was burning",
            "description": (
                "There are too few requests to say whether it is over. "
                "The alert of the burn goes on until there are."
            ),
            "runbook_url": "docs/runbooks/not-enough-data.md",
        },
    }


def _description(
    limit: Limit, objective: Objective, ratio: float, window: BurnWindow, target: str
) -> str:
    limit_ns = {"ttft": limit.ttft_ns, "tpot": limit.tpot_ns, "e2e": limit.e2e_ns}.get(objective)
    rate = f"{number(window.factor)} times the rate" if budget_ratio(ratio) else "more than none"
    bound = f" within {number(limit_ns / 1e6)} ms" if limit_ns is not None else ""
    return (
        f"Objective: {target} of requests good{bound}. "
        f"The alert says that the budget burns at {rate} that it allows."
    )


def _blind(divided_by: float) -> Rule:
    """The agent says so itself, or was there and is not any more. An agent that answers and has
    lost an engine is not blind: the engine is being restarted. A target that is not looked for any
    more was taken away on purpose, as the pods of a rolling restart are. What is pushed has no
    `up` at all."""
    metric = SLO_BLIND.prometheus
    remember = duration(REMEMBER_S / divided_by)
    return {
        "alert": BLIND,
        "expr": f"{metric} == 1\nor last_over_time({metric}[{remember}]) unless {metric}"
        "\n  unless on (job, instance) up == 1"
        f"\n  unless on (job, instance) (last_over_time(up[{remember}]) unless up)",
        "for": duration(max(2.0, EVALUATE_S / divided_by)),
        "labels": {"severity": "page"},
        "annotations": {
            "summary": "dsagent on {{ $labels.instance }} cannot see requests, or is gone",
            "description": "Nothing is known of the objectives: no alert of theirs is resolved.",
            "runbook_url": "docs/runbooks/blind.md",
        },
    }


def _cache(alert: CacheAlert) -> Rule:
    """A ratio of summed rates for each instance, never a mean of ratios."""
    over = duration(alert.for_s / 3)
    where = f"{{cache_name={quoted(alert.name)}}}"
    by = "by (instance, cache_name)"
    hits, asked = (
        f"sum {by} (increase({metric.prometheus}{where}[{over}]))"
        for metric in (catalog.CACHE_HIT, catalog.CACHE_REQUEST)
    )
    return {
        "alert": CACHE,
        "expr": f"{hits} / ({asked} >= {MIN_LOOKUPS}) < {number(alert.below_ratio)}",
        "for": duration(alert.for_s),
        "labels": {"severity": "page", "action": alert.action},
        "annotations": {
            "summary": f"cache {alert.name}: hit ratio below {number(alert.below_ratio * 100)} %",
            "description": f"For {duration(alert.for_s)}. Declared action: {alert.action}.",
            "runbook_url": "docs/runbooks/cache-hit-ratio.md",
        },
    }
