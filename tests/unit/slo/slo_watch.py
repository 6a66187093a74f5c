"""Simulated time for the evaluator, and requests that meet or miss an objective."""

from __future__ import annotations

from dataclasses import replace

from made import MS, S, account

from dsagent.agent.attribution.account import Account, Culprit, Part
from dsagent.agent.facts import SourceStatus
from dsagent.agent.slo.alert import Alert
from dsagent.agent.slo.cache import CircuitChange
from dsagent.agent.slo.evaluator import Evaluator
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Limit, Limits

SEES = (SourceStatus("steps", "ok"),)
SEES_NOT = (SourceStatus("steps", "unavailable", "the target has no step ring"),)


def request(*, bad: bool = False, **changes: object) -> Account:
    """TTFT 300 ms; 1000 ms where it is bad, for 600 ms of which somebody's prefill is to blame."""
    made = account(**{"start_ns": 2000 * S, **changes})  # type: ignore[arg-type]
    if not bad:
        return made
    start_ns = made.record.received_ns
    record = replace(made.record, first_sent_ns=start_ns + 1000 * MS, sent_ns=start_ns + 1700 * MS)
    blamed = Culprit("request", "long-one", 600 * MS, None, "long-one", "ab" * 16)
    parts = (
        Part("batch.prefill_interference", 600 * MS, "modelled", (), (blamed,)),
        Part("prefill.compute", 300 * MS, "modelled"),
    )
    after = Part("decode.compute", 700 * MS, "modelled")
    return replace(
        made,
        record=record,
        e2e_ns=1700 * MS,
        parts=(*parts, after),
        unattributed_ns=100 * MS,
        ttft_parts=parts,
        ttft_unattributed_ns=100 * MS,
    )


class Watch:
    """An evaluator with a clock. A limit of 500 ms on TTFT, 99 % of requests."""

    def __init__(self, file: SloFile | None = None, *, objective_ratio: float = 0.99) -> None:
        limit = Limit("*", ttft_ns=500 * MS, objective_ratio=objective_ratio)
        self.evaluator = Evaluator(file or SloFile(Limits((limit,))))
        self.now_ns = 5000 * S
        self.alerts: list[Alert] = []
        self.changes: list[CircuitChange] = []
        self.sources = SEES

    def run(self, seconds: float, *, every_s: float = 1.0, bad: bool = False, n: int = 1) -> None:
        """A tick each `every_s`, with `n` requests."""
        for _ in range(round(seconds / every_s)):
            self.now_ns += round(every_s * S)
            self.tick(*[request(bad=bad)] * n)

    def tick(self, *accounts: Account) -> None:
        alerts, changes = self.evaluator.take(accounts, self.sources, self.now_ns)
        self.alerts += alerts
        self.changes += changes

    def told(self) -> list[tuple[str, str, str]]:
        """Status, state and severity of what was told so far, and forgets it."""
        told: list[tuple[str, str, str]] = [
            (a.status, a.state, a.labels["severity"]) for a in self.alerts
        ]
        self.alerts.clear()
        return told

    def states(self) -> list[str]:
        return [series.state(self.now_ns) for series in self.evaluator.series.values()]
