"""Answers Prometheus' scrapes on GET /metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from dsagent.agent.listening.admission import Guard
from dsagent.agent.listening.pages import Page, PageServer, Tally
from dsagent.agent.metrics.aggregate import Aggregate
from dsagent.agent.metrics.series import Family
from dsagent.agent.metrics.slo_metrics import SloFigures
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.openmetrics import CLASSIC_TYPE, OPENMETRICS_TYPE, render
from dsagent.agent.slo import Limits


class PrometheusSink:
    """A sink that is pulled: what it counts as sent are answered scrapes."""

    name = "prometheus"

    def __init__(
        self,
        host: str,
        port: int,
        limits: Limits,
        *,
        sampler: Sampler | None = None,
        resource: Mapping[str, str] | None = None,
        slo: SloFigures | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`sampler`: the one that decides for all sinks; `resource`: resource_overrides();
        `slo`: what an evaluator, which is a sink before this one, finds; `guard`: who may scrape,
        without it whoever reaches loopback."""
        self._host = host
        self._port = port
        self._guard = guard or Guard()
        self._aggregate = Aggregate(limits, sampler or Sampler(), resource or {}, slo)
        self._lock = threading.Lock()
        self._server: PageServer | None = None

    @property
    def port(self) -> int:
        """Where it listens: the port chosen, if 0 was asked for."""
        return self._port

    def start(self) -> None:
        self._server = PageServer(self._host, self._port, "--prometheus", self._guard, self._page)
        self._port = self._server.port
        self._server.start("sink-prometheus")

    def _page(self, path: str, accept: str) -> Page:
        if path != "/metrics":
            return Page(404, CLASSIC_TYPE, "look at /metrics\n")
        openmetrics = "application/openmetrics-text" in accept
        text = render(self.collect(), openmetrics=openmetrics)
        return Page(200, OPENMETRICS_TYPE if openmetrics else CLASSIC_TYPE, text)

    def take(self, batch: Explained) -> None:
        with self._lock:
            self._aggregate.add(batch)

    def status(self) -> SinkStatus:
        """What does not become a page is dropped: too many clients, too slow, without the token."""
        tally = Tally() if self._server is None else self._server.tally
        return SinkStatus(
            self.name,
            tally.answered,
            tally.answered,
            tally.failed,
            tally.refused,
            tally.reason,
            notice=self._guard.notice,
        )

    def stop(self, deadline_s: float) -> None:
        if self._server is not None:
            self._server.stop(deadline_s)

    def collect(self) -> list[Family]:
        """What a scrape would show now."""
        with self._lock:
            return self._aggregate.collect()
