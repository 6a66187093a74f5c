"""Watches the objectives of a file without anybody's help: accounts in, alerts out.

Pure: no clock, no I/O. One caller at a time; times are monotonic nanoseconds and
never go back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from dsagent.agent.attribution.account import Account
from dsagent.agent.facts import SourceStatus
from dsagent.agent.slo.alarm import Alarm, AlarmState, Arrivals
from dsagent.agent.slo.alert import BLIND, BURN, CACHE, Alert, because, burn_text
from dsagent.agent.slo.cache import Circuit, CircuitChange
from dsagent.agent.slo.causes import Explanation, Violators, unfinished_violator, violator
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Limit
from dsagent.agent.slo.policy import (
    MIN_EVENTS,
    BurnWindow,
    Severity,
    agent_windows,
    budget_ratio,
    burn_rate,
)
from dsagent.agent.slo.unfinished import Unfinished
from dsagent.agent.slo.verdicts import Judge, SeriesKey, Verdict
from dsagent.agent.slo.window import S, SlidingCounts
from dsagent.instrumentation.records import RequestOpen, Step

AlertState = Literal["burning", "not enough data", "blind", "recovered"]
SeriesState = Literal["ok", "ticket", "page", "not_enough_data", "blind"]
STATES: tuple[SeriesState, ...] = ("ok", "ticket", "page", "not_enough_data", "blind")

EYES = "steps"  # the source without which no request is seen
BLIND_STATES = ("unavailable", "failed")
BLIND_FOR_NS = 5 * S  # so long before it is told, or said to be over
RETELL_NS = 30 * S  # an alert whose first cause has changed is told again, not more often


@dataclass(slots=True)
class Series:
    """One series: its counts since the agent attached, its windows, its alarms."""

    key: SeriesKey
    budget_ratio: float
    first_ns: int
    counts: dict[float, SlidingCounts]  # by the window's length in seconds
    alarms: tuple[Alarm, ...]
    arrivals: Arrivals
    events: int = 0
    bad: int = 0
    violators: Violators = field(default_factory=Violators)
    burnt_s: dict[str, float] = field(default_factory=dict)  # excess by cause, since attaching
    told: dict[Severity, tuple[str, int]] = field(default_factory=dict)  # first cause, when

    def state(self, now_ns: int) -> SeriesState:
        for alarm in self.alarms:
            if alarm.state == "firing":
                return alarm.severity
        if any(alarm.state == "no data" for alarm in self.alarms):
            return "not_enough_data"
        longest = max(self.counts)
        return "ok" if self.counts[longest].counts(now_ns)[0] >= MIN_EVENTS else "not_enough_data"


class Evaluator:
    """The state of every series, of the caches' circuits, and whether the agent sees at all."""

    def __init__(self, file: SloFile) -> None:
        self._judge = Judge(file.limits)
        self._windows = agent_windows(file.windows_divided_by)
        self._lengths = sorted({s for w in self._windows for s in (w.long_s, w.short_s)})
        self._unfinished = Unfinished()
        self.series: dict[SeriesKey, Series] = {}
        self.circuits = tuple(Circuit(alert) for alert in file.cache)
        self.is_blind = False
        self._eyes_turned_ns: int | None = None
        self._blind_since_ns = 0
        self.now_ns = 0

    @property
    def shown_lengths_s(self) -> tuple[float, float]:
        """The windows that its metrics tell of: the fastest pair's, in seconds."""
        return self._windows[0].short_s, self._windows[0].long_s

    def see(
        self, opened: Iterable[RequestOpen], ended: Iterable[int], steps: Iterable[Step]
    ) -> None:
        """What is under way, before the accounts of the same tick are taken."""
        self._unfinished.see(opened, ended, steps)

    def judge_unfinished(self, attached_ns: int, now_ns: int) -> None:
        """Who goes on beyond a limit violates it now. Not to be asked while something lies unread:
        an end may be in it."""
        known = self._judge.of_unfinished()
        if known is None or self.is_blind or self._eyes_turned_ns is not None:
            return
        limit, model = known
        for request, objective, over_ns in self._unfinished.overdue(limit, attached_ns, now_ns):
            key = self._judge.key_of(limit, objective, model)
            if self._unfinished.judge(request, key):
                series = self._count(key, limit, now_ns, is_bad=True)
                series.violators.add(unfinished_violator(request, over_ns, now_ns))

    def take(
        self, accounts: Iterable[Account], sources: Iterable[SourceStatus], now_ns: int
    ) -> tuple[list[Alert], list[CircuitChange]]:
        """One tick: what has changed."""
        now_ns = max(now_ns, self.now_ns)
        self.now_ns = now_ns
        alerts = self._look(sources, now_ns)
        for account in accounts:
            self._add(account, now_ns)
        if self.is_blind or self._eyes_turned_ns is not None:  # or about to know whether it is
            return alerts, []
        for series in self.series.values():
            for alarm in series.alarms:
                alerts += self._judge_alarm(series, alarm, now_ns)
        changes = [change for circuit in self.circuits if (change := circuit.judge(now_ns))]
        alerts += [_circuit_alert(change, now_ns) for change in changes]
        return alerts, changes

    def end(self, reason: str) -> list[Alert]:
        """The agent looks no more: what burns is not over, but out of sight."""
        return [
            self._burn_alert(series, alarm, "blind", reason, self.now_ns)
            for series in self.series.values()
            for alarm in series.alarms
            if alarm.state != "quiet"
        ]

    def _add(self, account: Account, now_ns: int) -> None:
        judged = self._unfinished.take_judged(account.record.request_key)
        for verdict in self._judge.verdicts(account):
            # Counted while it went on; now it is known why. One that turns out to be of another
            # model counts where it belongs, too.
            if verdict.key in judged:
                series = self.series[verdict.key]
                series.violators.forget(account.trace_id)
            else:
                series = self._count(verdict.key, verdict.limit, now_ns, is_bad=verdict.is_bad)
            if verdict.is_bad:
                _blame(series, account, verdict, now_ns)
        record = account.record
        served = record.first_scheduled_ns is not None and not account.partial
        if served and record.prompt_tokens and record.cached_tokens is not None:
            for circuit in self.circuits:
                if circuit.alert.name == "prefix":
                    circuit.add(record.cached_tokens, record.prompt_tokens, now_ns)

    def _count(self, key: SeriesKey, limit: Limit, now_ns: int, *, is_bad: bool) -> Series:
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = self._new(key, limit, now_ns)
        series.events += 1
        series.arrivals.add(now_ns)
        series.bad += is_bad
        for counts in series.counts.values():
            counts.add(now_ns, 1, int(is_bad))
        for alarm in series.alarms:
            alarm.add(is_bad)
        return series

    def _new(self, key: SeriesKey, limit: Limit, now_ns: int) -> Series:
        budget = budget_ratio(limit.objectives[key.objective])
        return Series(
            key,
            budget,
            now_ns,
            {length_s: SlidingCounts(length_s) for length_s in self._lengths},
            tuple(
                Alarm(severity, windows, budget) for severity, windows in _grouped(self._windows)
            ),
            Arrivals(now_ns),
        )

    def _judge_alarm(self, series: Series, alarm: Alarm, now_ns: int) -> list[Alert]:
        turned = alarm.judge(
            series.counts,
            series.first_ns,
            now_ns,
            have_stopped=series.arrivals.have_stopped(now_ns),
        )
        told_cause, told_ns = series.told.get(alarm.severity, ("", 0))
        if turned is None:
            if alarm.state != "firing" or now_ns - told_ns < RETELL_NS:
                return []
            causes = self._explain(series, alarm, now_ns).causes
            if not causes or causes[0][0] == told_cause:
                return []
        return [self._burn_alert(series, alarm, _STATE_OF[alarm.state], "", now_ns)]

    def _explain(self, series: Series, alarm: Alarm, now_ns: int) -> Explanation:
        assert alarm.window is not None
        return series.violators.explain(now_ns - round(alarm.window.long_s * S))

    def _burn_alert(
        self, series: Series, alarm: Alarm, state: AlertState, reason: str, now_ns: int
    ) -> Alert:
        assert alarm.window is not None
        explanation = self._explain(series, alarm, now_ns)
        first_cause = explanation.causes[0][0] if explanation.causes else ""
        series.told[alarm.severity] = (first_cause, now_ns)
        events, bad = series.counts[alarm.window.long_s].counts(now_ns)
        burn = burn_rate(bad, events, series.budget_ratio)
        what = burn_text(series.key.objective, burn, bad, events)
        match state:
            case "burning":
                summary = f"{what}: {because(explanation)}"
            case "recovered":
                summary = f"{what} over the long window, and no more: requests meet it again"
            case "not enough data":
                summary = f"{what} when requests stopped: not known whether it is over"
            case _:
                summary = f"{what} when last seen: {reason}"
        figures = {
            "bad": str(bad),
            "events": str(events),
            "long_window_s": f"{alarm.window.long_s:g}",
            "short_window_s": f"{alarm.window.short_s:g}",
        }
        if burn is not None:
            figures["burn_rate"] = f"{burn:.4g}"
        return Alert(
            BURN,
            "resolved" if state == "recovered" else "firing",
            state,
            {
                **series.key.labels(),
                "model": series.key.model,
                "severity": alarm.severity,
            },
            summary,
            alarm.since_ns,
            now_ns,
            explanation,
            figures,
        )

    def _look(self, sources: Iterable[SourceStatus], now_ns: int) -> list[Alert]:
        """Whether requests can be seen. Nothing is judged while they cannot."""
        status = next((each for each in sources if each.name == EYES), None)
        if status is None:
            return []
        if (status.state in BLIND_STATES) == self.is_blind:
            self._eyes_turned_ns = None
            return []
        if self._eyes_turned_ns is None:
            self._eyes_turned_ns = now_ns
        if now_ns - self._eyes_turned_ns < BLIND_FOR_NS:
            return []
        self.is_blind = not self.is_blind
        if self.is_blind:
            self._blind_since_ns = self._eyes_turned_ns
            summary = f"no request can be seen: {status.reason or status.state}"
        else:
            summary = "requests can be seen again"
            self._skip(now_ns - self._blind_since_ns)
        self._eyes_turned_ns = None
        return [
            Alert(
                BLIND,
                "firing" if self.is_blind else "resolved",
                "blind" if self.is_blind else "recovered",
                {"severity": "page"},
                summary,
                self._blind_since_ns,
                now_ns,
            )
        ]

    def _skip(self, length_ns: int) -> None:
        """Nobody looked for so long: that requests did not come meanwhile says nothing."""
        for series in self.series.values():
            series.arrivals.last_ns += length_ns
            for alarm in series.alarms:
                alarm.unseen(length_ns)


def _blame(series: Series, account: Account, verdict: Verdict, now_ns: int) -> None:
    """Says why a bad request was bad."""
    found = violator(account, verdict, now_ns)
    series.violators.add(found)
    if verdict.over_ns is not None:
        for cause, ns in found.causes.items():
            series.burnt_s[cause] = series.burnt_s.get(cause, 0.0) + ns / 1e9


def _circuit_alert(change: CircuitChange, now_ns: int) -> Alert:
    alert = change.alert
    where = "below" if change.is_open else "at or above"
    return Alert(
        CACHE,
        "firing" if change.is_open else "resolved",
        "low" if change.is_open else "recovered",
        {"cache_name": alert.name, "action": alert.action, "severity": "page"},
        f"cache {alert.name}: hit ratio {change.hit_ratio:.0%}, {where} {alert.below_ratio:.0%} "
        f"for {alert.for_s:g} s: {alert.action} {'on' if change.is_open else 'off'}",
        change.since_ns,
        now_ns,
        figures={"hit_ratio": f"{change.hit_ratio:.4f}"},
    )


def _grouped(
    windows: tuple[BurnWindow, ...],
) -> list[tuple[Severity, tuple[BurnWindow, ...]]]:
    """By severity, pages first."""
    severities: tuple[Severity, ...] = ("page", "ticket")
    return [(each, tuple(w for w in windows if w.severity == each)) for each in severities]


_STATE_OF: dict[AlarmState, AlertState] = {
    "firing": "burning",
    "no data": "not enough data",
    "quiet": "recovered",
}
