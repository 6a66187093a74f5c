"""What is told of a feature that moved. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsagent.agent.anomalies.features import Kind
from dsagent.agent.facts import Event
from dsagent.agent.screens.wording import ms

State = Literal["begun", "outgrew", "ended", "usual now"]

# As events are called.
EVENT_NAMES: Mapping[State, str] = {
    "begun": "anomaly.begun",
    "outgrew": "anomaly.begun",
    "ended": "anomaly.ended",
    "usual now": "anomaly.usual_now",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """`feature` moved from `usual` to `value` (medians over what was seen of it so far)."""

    kind: Kind
    state: State
    feature: str  # a span's attribute
    value: float
    usual: float
    unit: str
    score: float  # the largest, in robust standard deviations
    seen: int  # steps, or requests, above what is usual
    begun_ns: int
    now_ns: int
    also: tuple[str, ...] = ()  # features that moved with it
    trace_ids: tuple[str, ...] = ()  # 32 hex digits; the one that moved most first

    @property
    def is_over(self) -> bool:
        return self.state in ("ended", "usual now")

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "state": self.state,
            "feature": self.feature,
            "value": self.value,
            "usual": self.usual,
            "unit": self.unit,
            "score": self.score,
            "seen": self.seen,
            "begun_ns": self.begun_ns,
            "lasted_ns": self.now_ns - self.begun_ns,
            "also": list(self.also),
            "trace_ids": list(self.trace_ids),
        }

    def line(self) -> str:
        """For people."""
        lasted = ms(self.now_ns - self.begun_ns)
        if self.state == "ended":
            return f"anomaly over after {lasted}: {self.feature} of {self.kind}s is as usual"
        if self.state == "usual now":
            return (
                f"anomaly has lasted {lasted}: {self.feature} of {self.kind}s at "
                f"{ms(round(self.value))} is taken as usual from now on"
            )
        traces = f", most in trace {self.trace_ids[0]}" if self.trace_ids else ""
        also = f"; with it {', '.join(self.also[:3])}" if self.also else ""
        return (
            f"anomaly: {self.feature} of {self.kind}s is {ms(round(self.value))}, usually "
            f"{ms(round(self.usual))} ({self.seen} {self.kind}s{traces}){also}"
        )

    def event(self) -> Event:
        return Event(
            EVENT_NAMES[self.state],
            self.now_ns,
            self.line(),
            {
                "dsagent.anomaly.kind": self.kind,
                "dsagent.anomaly.state": self.state,
                "dsagent.anomaly.feature": self.feature,
                "dsagent.anomaly.value": round(self.value),
                "dsagent.anomaly.usual": round(self.usual),
                "dsagent.anomaly.unit": self.unit,
                "dsagent.anomaly.seen": self.seen,
                "dsagent.anomaly.lasted_ns": self.now_ns - self.begun_ns,
                "dsagent.anomaly.also": " ".join(self.also),
            },
            self.trace_ids,
        )
