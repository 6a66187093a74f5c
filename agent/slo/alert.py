"""What the evaluator tells: an alert, new or changed, in words and as labels. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsagent.agent.attribution.account import Culprit
from dsagent.agent.host.procfs import escape
from dsagent.agent.slo.causes import OWN_WORK, Explanation
from dsagent.agent.slo.limits import Objective

BURN, BLIND, CACHE = "DsagentSloBurn", "DsagentBlind", "DsagentCacheHitRatio"

Status = Literal["firing", "resolved"]
State = Literal["burning", "not enough data", "blind", "recovered", "low"]

OBJECTIVE_TEXT: dict[Objective, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "e2e": "duration",
    "errors": "error rate",
    "goodput": "goodput",
}


@dataclass(frozen=True, slots=True)
class Alert:
    """`labels` identify it: the same from firing to resolved. Times are monotonic ns."""

    name: str
    status: Status
    state: State
    labels: dict[str, str]
    summary: str
    since_ns: int
    now_ns: int
    explanation: Explanation = field(default_factory=Explanation)
    figures: dict[str, str] = field(default_factory=dict)


def alert_line(alert: Alert) -> str:
    """One line for a terminal."""
    severity = alert.labels.get("severity", "page")
    what = "resolved" if alert.status == "resolved" else f"{severity} ({alert.state})"
    whose = f" [{alert.labels['slo']}]" if "slo" in alert.labels else ""
    return escape(f"{what}{whose}: {alert.summary}", limit=400)


def burn_text(objective: Objective, burn: float | None, bad: int, events: int) -> str:
    """time per output token burning 14×."""
    what = OBJECTIVE_TEXT[objective]
    if burn is None:
        return f"{what}: {bad} of {events} requests bad, where none may be"
    return f"{what} burning {_times(burn)}×"


def because(explanation: Explanation) -> str:
    """58 % batch.prefill_interference, 21 % cpu.runqueue; by process stress-ng."""
    if not explanation.causes:
        return "no cause is known yet"
    causes = ", ".join(f"{_percent(share)} {name}" for name, share in explanation.causes)
    whom = explanation.culprits[:1]
    text = f"{causes}; most of all by {culprit_text(whom[0][1])}" if whom else causes
    if explanation.causes[0][0] == OWN_WORK:
        text += " (nothing was unusual: the limit is tighter than what such a request takes)"
    return text


def culprit_text(culprit: Culprit) -> str:
    if culprit.kind == "request":
        return f"request {culprit.request_id or culprit.name}"
    return f"{culprit.kind} {culprit.name}" + (f" ({culprit.pid})" if culprit.pid else "")


def culprits_text(culprits: Sequence[tuple[str, Culprit]]) -> str:
    return "; ".join(f"{culprit_text(culprit)}: {cause}" for cause, culprit in culprits)


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _times(burn: float) -> str:
    return f"{burn:.0f}" if burn >= 9.95 else f"{burn:.1f}"
