"""Unit tests for the rules, to be run by `promtool test rules`: made from the same file, so that
whoever changes an objective has tests of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsagent.agent.metrics.slo_metrics import SLO_BAD, SLO_BLIND, SLO_BURNT, SLO_EVENTS
from dsagent.agent.slo.alert import BLIND, BURN, OBJECTIVE_TEXT
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Objective
from dsagent.agent.slo.policy import budget_ratio, windows
from dsagent.dashboards.rules_names import duration, number, quoted, recorded
from dsagent.dashboards.rules_prometheus import NO_DATA, groups
from dsagent.dashboards.rules_texts import MODEL

STEP_S = 60.0  # from one evaluation to the next, unscaled: the first page's windows are 60 and 5
GOOD, BURNING, AFTER = 70, 62, 20  # steps
END, LATER = GOOD + BURNING, GOOD + BURNING + AFTER - 2
RELIEF = END + 3  # where the threshold is high, no moment burns any more, and it is not over yet

CAUSES = (("batch.prefill_interference", 3), ("cpu.runqueue", 1))  # seconds a step

Test = dict[str, Any]


def document(file: SloFile, rules_name: str) -> dict[str, Any]:
    """The document of a promtool test file, which lies beside the rules. One test has a series of
    every objective for every story, told by its model: they do not touch each other."""
    made = _Tests(file)
    return {
        "rule_files": [rules_name],
        "evaluation_interval": made.step,
        # Else chance decides whether an alert sees this moment's windows or the last one's.
        "group_eval_order": [group["name"] for group in groups(file)["groups"]],
        "tests": [made.of_burns(), made.of_blindness()],
    }


@dataclass(frozen=True, slots=True)
class _Story:
    """What happens to one model: its requests, and the bad ones, in promtool's notation."""

    model: str
    events: str
    bad: str
    alerts: tuple[tuple[str, int, bool], ...]  # which, at which step, fires or not


_BURNS, _BURNT = f"0x{GOOD} 0+10x{BURNING}", 10 * BURNING
BURNING_STORIES = (
    _Story(
        "burns, then its requests are good again",
        f"0+10x{END + AFTER}",
        f"{_BURNS} {_BURNT}x{AFTER}",
        (
            (BURN, GOOD - 5, False),
            (BURN, END, True),
            (NO_DATA, END, False),
            (BURN, RELIEF, True),
            (NO_DATA, RELIEF, False),
            (BURN, LATER, False),
        ),
    ),
    _Story(
        "burns, then requests stop: not enough data, not resolved",
        f"0+10x{END} {10 * END}x{AFTER}",
        f"{_BURNS} {_BURNT}x{AFTER}",
        ((BURN, END, True), (BURN, LATER, True), (NO_DATA, LATER, True)),
    ),
    _Story(
        "burns, then the agent is killed: not resolved",
        f"0+10x{END} stale",
        f"{_BURNS} stale",
        ((BURN, END, True), (BURN, LATER, True), (NO_DATA, LATER, True)),
    ),
)
CALM_STORIES = (
    _Story("one error", "0+1x150", "0x50 1x100", tuple((BURN, at, False) for at in (51, 55, 149))),
    _Story(
        "few requests, however bad",
        "0x20 1 2 3x60",
        "0x20 1 2 3x60",
        tuple((BURN, at, False) for at in (22, 30, 80)),
    ),
    _Story(
        "counters that begin anew",
        "0+10x50 0+10x50",
        "0x50 0x50",
        tuple((BURN, at, False) for at in (51, 55, 99)),
    ),
)


class _Tests:
    def __init__(self, file: SloFile) -> None:
        self._file = file
        self._step_s = STEP_S / file.windows_divided_by
        self.step = duration(self._step_s)
        self._page = windows(file.windows_divided_by)[0]
        self._series = [
            (limit, objective, ratio)
            for limit in file.limits.entries
            for objective, ratio in limit.objectives.items()
        ]

    def of_burns(self) -> Test:
        stories = (*BURNING_STORIES, *CALM_STORIES)
        # Nothing is divided by the requests that do not come.
        stopped = BURNING_STORIES[1].model
        ratios = f"{recorded('ratio', self._page.short_s)}{{{MODEL}={quoted(stopped)}}}"
        return {
            "name": "objectives",
            "interval": self.step,
            "input_series": [each for story in stories for each in self._input(story)],
            "alert_rule_test": [self._burning()],
            "promql_expr_test": [
                *(
                    self._expect(self._alert(name, story), step, len(self._series) * fires)
                    for story in stories
                    for name, step, fires in story.alerts
                ),
                self._expect(ratios, LATER, 0),
            ],
        }

    def of_blindness(self) -> Test:
        """Of five agents: one that pushes, says so, and then is gone; one that is killed, and
        looked for in vain; one that answers, and whose engine is restarted; one whose pod is taken
        away, and its target with it; one that goes on."""
        stories = (
            ("pushed", "0x20 1x20 0x20 stale", ""),
            ("killed", "0x60 stale", "1x60 0x60"),
            ("engine-restarts", "0x60 stale", "1x120"),
            ("pod-replaced", "0x60 stale", "1x60 stale"),
            ("goes-on", "0x120", "1x120"),
        )
        series = [
            {"series": f'{name}{{instance="{agent}", job="dsagent"}}', "values": values}
            for agent, blind, up in stories
            for name, values in ((SLO_BLIND.prometheus, blind), ("up", up))
            if values
        ]
        fired = (
            *(("pushed", 10, 0), ("pushed", 35, 1), ("pushed", 55, 0), ("pushed", 75, 1)),
            *(("killed", 55, 0), ("killed", 75, 1)),
            *((agent, at, 0) for agent, *_ in stories[2:] for at in (35, 75, 110)),
        )
        return {
            "name": "blind: the agent says so, or is gone; not where an engine is replaced",
            "interval": self.step,
            "input_series": series,
            "promql_expr_test": [
                self._expect(_alerts(BLIND, alertstate="firing", instance=agent), at, count)
                for agent, at, count in fired
            ],
        }

    def _alert(self, name: str, story: _Story) -> str:
        """The page's alerts of a story: one of each objective."""
        window = duration(self._page.long_s)
        return _alerts(name, alertstate="firing", window=window, **{MODEL: story.model})

    def _expect(self, expr: str, step: int, count: int) -> dict[str, Any]:
        return {
            "expr": f"count({expr})",
            "eval_time": duration(step * self._step_s),
            "exp_samples": [{"labels": "{}", "value": count}] if count else [],
        }

    def _burning(self) -> dict[str, Any]:
        """Every alert at the end of the burns, with its annotations in full: those of the rules,
        with the shares of the causes filled in."""
        over = {
            (limit.label, objective, duration(window.long_s)): _text(objective, bad, budget)
            for limit, objective, ratio in self._series
            for window in windows(self._file.windows_divided_by)
            if (bad := self._ratio(window.long_s))
            > window.threshold_ratio(budget := budget_ratio(ratio))
        }
        alerts = []
        for rule in (rule for group in groups(self._file)["groups"] for rule in group["rules"]):
            labels = rule.get("labels", {})
            key = (labels.get("slo"), labels.get("objective"), labels.get("window"))
            if rule.get("alert") == BURN and key in over:
                alerts += [
                    {
                        "exp_labels": {**labels, MODEL: story.model},
                        "exp_annotations": {
                            **rule["annotations"],
                            **{name: text.format(story.model) for name, text in over[key].items()},
                        },
                    }
                    for story in BURNING_STORIES
                ]
        return {
            "alertname": BURN,
            "eval_time": duration(END * self._step_s),
            "exp_alerts": alerts,
        }

    def _ratio(self, window_s: float) -> float:
        """Of bad requests, at the end of the burn."""
        steps = min(round(window_s / self._step_s), END)
        return min(BURNING - 1, steps) / steps

    def _input(self, story: _Story) -> Iterator[dict[str, str]]:
        for limit, objective, _ in self._series:
            labels = ", ".join(
                f"{name}={quoted(text)}"
                for name, text in (
                    ("slo", limit.label),
                    ("objective", objective),
                    (MODEL, story.model),
                    ("instance", "a"),
                )
            )
            yield {"series": f"{SLO_EVENTS.prometheus}{{{labels}}}", "values": story.events}
            yield {"series": f"{SLO_BAD.prometheus}{{{labels}}}", "values": story.bad}
            if story in BURNING_STORIES:
                for cause, each in CAUSES:
                    name = f'{SLO_BURNT.prometheus}{{{labels}, cause="{cause}"}}'
                    yield {"series": name, "values": f"0x{GOOD} 0+{each}x{BURNING}"}


def _text(objective: Objective, bad_ratio: float, budget: float) -> dict[str, str]:
    """What the alert says, for a model that is to be filled in."""
    burn = bad_ratio / float(number(budget)) if budget else None
    times = "" if burn is None else f" {burn:.1f}×" if burn < 9.95 else f" {burn:.0f}×"
    what = f"{OBJECTIVE_TEXT[objective]} of {{}} burning{times}"
    if objective == "errors":
        return {"summary": what}
    total = sum(each for _, each in CAUSES)
    causes = ", ".join(f"{100 * each // total} % {cause}" for cause, each in CAUSES)
    return {"summary": f"{what}: {causes}", "causes": causes}


def _alerts(name: str, **labels: str) -> str:
    matchers = {"alertname": name, **labels}
    return f"ALERTS{{{', '.join(f'{label}={quoted(text)}' for label, text in matchers.items())}}}"
