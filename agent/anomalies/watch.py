"""Watches the steps and requests of one attachment, and tells what moved."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dsagent.agent.anomalies.episodes import Episodes
from dsagent.agent.anomalies.features import Kind, Observation, of_account, of_step
from dsagent.agent.anomalies.finding import Finding
from dsagent.agent.attribution.account import Account
from dsagent.agent.facts import Event, Sample
from dsagent.agent.metrics.anomaly_metrics import ANOMALY_ACTIVE, ANOMALY_FINDINGS
from dsagent.instrumentation.records import RequestOpen, Step

MAX_TRACES = 4096  # of requests open or just ended, whose trace ids are known
KEPT_FINDINGS = 64
SHOWN_EVERY_NS = 1_000_000_000


class AnomalyWatch:
    """Bounded in memory and in what it tells: an episode of a kind makes one finding when it
    begins, one when it ends, and seldom one between."""

    def __init__(self) -> None:
        self._steps = Episodes("step")
        self._requests = Episodes("request")
        self._trace_ids: OrderedDict[int, int] = OrderedDict()  # by request key
        self._findings: deque[Finding] = deque(maxlen=KEPT_FINDINGS)
        self._counts: Counter[tuple[Kind, str]] = Counter()
        self._shown_ns: int | None = None

    def look(
        self,
        opened: Iterable[RequestOpen],
        steps: Iterable[Step],
        accounts: Iterable[Account],
        now_ns: int,
    ) -> list[Event]:
        """What one tick brought; returns what there is to tell."""
        for request in opened:
            self._know(request.request_key, request.trace_id)
        for account in accounts:
            self._know(account.record.request_key, account.record.trace_id)
            self._add(self._requests, of_account(account))
        for step in steps:
            self._add(self._steps, of_step(step))
        found = [
            finding
            for episodes in (self._steps, self._requests)
            for finding in episodes.look(now_ns, self._trace_ids)
        ]
        for finding in found:
            self._keep(finding)
        return [finding.event() for finding in found]

    def samples(self, now_ns: int) -> list[Sample]:
        """Once a second. Counters begin at 0 with the feature being watched."""
        if self._shown_ns is not None and now_ns - self._shown_ns < SHOWN_EVERY_NS:
            return []
        self._shown_ns = now_ns
        samples = []
        for episodes in (self._steps, self._requests):
            kind = episodes.detector.kind
            told = {feature for of, feature in self._counts if of == kind}
            for feature in sorted(episodes.detector.watched() | told):
                labels = {"kind": kind, "feature": feature}
                count = float(self._counts[kind, feature])
                samples.append(Sample(ANOMALY_FINDINGS.name, count, now_ns, labels))
            is_open = float(episodes.open is not None)
            samples.append(Sample(ANOMALY_ACTIVE.name, is_open, now_ns, {"kind": kind}))
        return samples

    def document(self, since_ns: int = 0) -> list[dict[str, Any]]:
        """The findings of episodes that were not over at `since_ns`, each as last told."""
        return [
            finding.to_json()
            for finding in self._findings
            if finding.now_ns >= since_ns or not finding.is_over
        ]

    def _know(self, request_key: int, trace_id: int) -> None:
        self._trace_ids[request_key] = trace_id
        self._trace_ids.move_to_end(request_key)
        if len(self._trace_ids) > MAX_TRACES:
            self._trace_ids.popitem(last=False)

    def _keep(self, finding: Finding) -> None:
        """The end of an episode is that of each finding it made."""
        if not finding.is_over:
            self._counts[finding.kind, finding.feature] += 1
            self._findings.append(finding)
            return
        for place, earlier in enumerate(self._findings):
            if earlier.kind == finding.kind and not earlier.is_over:
                self._findings[place] = replace(earlier, state=finding.state, now_ns=finding.now_ns)

    @staticmethod
    def _add(episodes: Episodes, observed: Observation | None) -> None:
        if observed is not None:
            episodes.detector.add(observed)
