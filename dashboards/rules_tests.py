"""Unit tests for the rules, to be run by `promtool test rules`: made from the same file, so that
whoever changes an objective has tests of it."""

from __future__ import annotations

from typing import Any

from dsagent.agent import catalog
from dsagent.agent.metric import prometheus_label
from dsagent.agent.slo.alert import BLIND, BURN
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Limit, Objective
from dsagent.agent.slo.policy import budget_ratio, windows
from dsagent.agent.slo_metrics import SLO_BAD, SLO_BLIND, SLO_BURNT, SLO_EVENTS
from dsagent.dashboards.rules_prometheus import (
    EVALUATE_S,
    NO_DATA,
    duration,
    groups,
    quoted,
    recorded,
)

GOOD_STEPS = 150  # evaluations; the first page's windows are 120 and 10 of them
BURNING_STEPS = 50
AFTER_STEPS = 60

Test = dict[str, Any]


def document(file: SloFile, rules_name: str) -> dict[str, Any]:
    """The document of a promtool test file, which lies beside the rules."""
    step = duration(EVALUATE_S / file.windows_divided_by)
    made = _Tests(file, step)
    tests = [
        test
        for limit in file.limits.entries
        for objective, ratio in limit.objectives.items()
        for test in made.of(limit, objective, ratio)
    ]
    return {
        "rule_files": [rules_name],
        "evaluation_interval": step,
        "tests": [*tests, made.blind()],
    }


class _Tests:
    def __init__(self, file: SloFile, step: str) -> None:
        self._file = file
        self._step = step
        self._step_s = EVALUATE_S / file.windows_divided_by
        self._windows = windows(file.windows_divided_by)

    def of(self, limit: Limit, objective: Objective, ratio: float) -> list[Test]:
        burns = f"0x{GOOD_STEPS} 0+10x{BURNING_STEPS}"
        burnt = 10 * BURNING_STEPS
        all_events = f"0+10x{GOOD_STEPS + BURNING_STEPS + AFTER_STEPS}"
        stopped = 10 * (GOOD_STEPS + BURNING_STEPS)
        stops = f"0+10x{GOOD_STEPS + BURNING_STEPS} {stopped}x{AFTER_STEPS}"
        at_end, after = GOOD_STEPS + BURNING_STEPS, GOOD_STEPS + BURNING_STEPS + AFTER_STEPS - 5
        page = self._windows[0]
        firing = self._alerts(limit, objective, BURN)
        silent = self._alerts(limit, objective, NO_DATA)
        zero = f"{recorded('ratio', page.short_s)}{{slo={quoted(limit.label)}}}"
        gone = f"0+10x{GOOD_STEPS + BURNING_STEPS} stale"
        return [
            self._test(
                "burns, then requests are good again",
                limit,
                objective,
                (all_events, f"{burns} {burnt}x{AFTER_STEPS}"),
                [
                    self._expect(firing, GOOD_STEPS - 5, False),
                    self._expect(firing, at_end, True),
                    self._expect(silent, at_end, False),
                    self._expect(firing, after, False),
                ],
                alerts=[self._burning(limit, objective, at_end)] if ratio < 1 else [],
            ),
            self._test(
                "burns, then requests stop: not enough data, not resolved",
                limit,
                objective,
                (stops, f"{burns} {burnt}x{AFTER_STEPS}"),
                [
                    self._expect(firing, after, True),
                    self._expect(silent, after, True),
                    self._expect(zero, after, False),
                ],
            ),
            self._test(
                "burns, then the agent is killed: not resolved",
                limit,
                objective,
                (gone, f"{burns} stale"),
                [self._expect(firing, after, True), self._expect(silent, after, True)],
            ),
            self._test(
                "one error alarms nobody",
                limit,
                objective,
                (f"0+1x{after}", f"0x100 1x{after - 100}"),
                [self._never(limit, objective, at) for at in (101, 110, 150, after)],
            ),
            self._test(
                "few requests alarm nobody, however bad",
                limit,
                objective,
                ("0x20 1 2 3x200", "0x20 1 2 3x200"),
                [self._never(limit, objective, at) for at in (22, 30, 100)],
            ),
            self._test(
                "counters that begin anew alarm nobody",
                limit,
                objective,
                ("0+10x100 0+10x100", f"0x100 0x{100}"),
                [self._never(limit, objective, at) for at in (101, 105, 150)],
            ),
        ]

    def blind(self) -> Test:
        series = f'{SLO_BLIND.prometheus}{{instance="a", job="dsagent"}}'
        firing = f'ALERTS{{alertname={quoted(BLIND)}, alertstate="firing"}}'
        return {
            "name": "blind: the agent says so, or is gone",
            "interval": self._step,
            "input_series": [
                {"series": series, "values": "0x20 1x20 0x20 stale"},
            ],
            "promql_expr_test": [
                self._expect(firing, 10, False),
                self._expect(firing, 35, True),
                self._expect(firing, 55, False),
                self._expect(firing, 75, True),
            ],
        }

    def _labels(self, limit: Limit, objective: Objective) -> str:
        model = prometheus_label(catalog.MODEL)
        return f'slo={quoted(limit.label)}, objective={quoted(objective)}, {model}="m"'

    def _alerts(self, limit: Limit, objective: Objective, name: str) -> str:
        window = quoted(duration(self._windows[0].long_s))
        labels = f"slo={quoted(limit.label)}, objective={quoted(objective)}, window={window}"
        return f'ALERTS{{alertname={quoted(name)}, alertstate="firing", {labels}}}'

    def _never(self, limit: Limit, objective: Objective, step: int) -> dict[str, Any]:
        labels = f"slo={quoted(limit.label)}, objective={quoted(objective)}"
        return self._expect(f"ALERTS{{alertname={quoted(BURN)}, {labels}}}", step, False)

    def _expect(self, expr: str, step: int, is_there: bool) -> dict[str, Any]:
        return {
            "expr": f"count({expr})",
            "eval_time": duration(step * self._step_s),
            "exp_samples": [{"labels": "{}", "value": 1}] if is_there else [],
        }

    def _burning(self, limit: Limit, objective: Objective, step: int) -> dict[str, Any]:
        """Every alert of that name, with its annotations in full: those of the rules, with the
        shares of the causes filled in."""
        model = prometheus_label(catalog.MODEL)
        rules = [
            rule
            for group in groups(self._file)["groups"]
            for rule in group["rules"]
            if rule.get("alert") == BURN
            and rule["labels"]["slo"] == limit.label
            and rule["labels"]["objective"] == objective
        ]
        alerts = [
            {
                "exp_labels": {**rule["labels"], model: "m"},
                "exp_annotations": {
                    **{
                        name: text.replace(f"{{{{ $labels.{model} }}}}", "m")
                        for name, text in rule["annotations"].items()
                    },
                    "causes": "75% batch.prefill_interference 25% cpu.runqueue ",
                },
            }
            for rule, window in zip(rules, self._windows, strict=True)
            if self._is_over(limit, objective, window.long_s, window.short_s, window.factor)
        ]
        return {
            "alertname": BURN,
            "eval_time": duration(step * self._step_s),
            "exp_alerts": alerts,
        }

    def _is_over(
        self, limit: Limit, objective: Objective, long_s: float, short_s: float, factor: float
    ) -> bool:
        """Whether so many bad ones, among all that the windows have seen, are above it."""
        budget = budget_ratio(limit.objectives[objective])
        seen = [min(s / self._step_s, GOOD_STEPS + BURNING_STEPS) for s in (long_s, short_s)]
        return all(BURNING_STEPS / max(n, BURNING_STEPS) > min(factor * budget, 0.95) for n in seen)

    def _test(
        self,
        name: str,
        limit: Limit,
        objective: Objective,
        values: tuple[str, str],
        expected: list[dict[str, Any]],
        alerts: list[dict[str, Any]] | None = None,
    ) -> Test:
        labels = self._labels(limit, objective)
        series = [
            {"series": f'{metric.prometheus}{{{labels}, instance="a"}}', "values": text}
            for metric, text in zip((SLO_EVENTS, SLO_BAD), values, strict=True)
        ]
        test: Test = {"name": f"{limit.label} {objective}: {name}", "interval": self._step}
        if alerts:
            series += [
                {
                    "series": f'{SLO_BURNT.prometheus}{{{labels}, cause="{cause}", instance="a"}}',
                    "values": f"0x{GOOD_STEPS} 0+{each}x{BURNING_STEPS}",
                }
                for cause, each in (("batch.prefill_interference", 3), ("cpu.runqueue", 1))
            ]
            test["alert_rule_test"] = alerts
        test["input_series"] = series
        test["promql_expr_test"] = expected
        return test
