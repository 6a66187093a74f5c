"""Adds up metrics for a page that somebody else serves: one for all engines of a sidecar."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from dsagent.agent.metrics.aggregate import Aggregate
from dsagent.agent.metrics.series import Family
from dsagent.agent.metrics.slo_metrics import SloFigures
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.slo import Limits


class CollectedSink:
    """Goes on through as many attachments as there are, of one engine after the other: its
    counters do not begin anew when the engine does. Counts the collections."""

    name = "prometheus"

    def __init__(
        self,
        limits: Limits,
        sampler: Sampler,
        resource: Mapping[str, str],
        slo: SloFigures | None = None,
    ) -> None:
        self._aggregate = Aggregate(limits, sampler, resource, slo)
        self._lock = threading.Lock()
        self._collected = 0

    def start(self) -> None:
        """There is nothing to begin."""

    def take(self, batch: Explained) -> None:
        with self._lock:
            self._aggregate.add(batch)

    def collect(self) -> list[Family]:
        with self._lock:
            self._collected += 1
            return self._aggregate.collect()

    def status(self) -> SinkStatus:
        with self._lock:
            return SinkStatus(self.name, self._collected, self._collected)

    def stop(self, deadline_s: float) -> None:
        """There is nothing to flush."""
