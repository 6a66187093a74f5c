"""The one HTTP listener: /metrics of all engines, and /healthz and /readyz for people.

Neither is meant as a probe of Kubernetes: what the sidecar lacks is no reason to stop the pod.
A port that is taken is tried again, ever more rarely.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening.admission import Guard, ListenOptions
from dsagent.agent.listening.pages import Page, PageServer
from dsagent.agent.metrics.series import Family, HistogramPoint, NumberPoint
from dsagent.agent.settings import parse_address
from dsagent.agent.sidecar.backoff import Backoff
from dsagent.agent.sinks.openmetrics import CLASSIC_TYPE, OPENMETRICS_TYPE, render

JSON_TYPE = "application/json"
ENGINE_LABEL = "engine"  # the number of its place: it survives a restart, unlike a pid
FLAG = "--listen"


def merged(
    own: Iterable[Family], by_engine: Iterable[tuple[str, bool, Sequence[Family]]]
) -> list[Family]:
    """One page of all: the sidecar's `own` families, and each engine's with its label. Of an
    engine that is not there (False), only what adds up is shown: a gauge would be a lie. Pure."""
    families: dict[str, Family] = {family.metric.name: family for family in own}
    for name, is_there, its_families in by_engine:
        for family in its_families:
            if family.metric.kind == "gauge" and not is_there:
                continue
            before = families.get(family.metric.name, Family(family.metric))
            label = (ENGINE_LABEL, name)
            families[family.metric.name] = Family(
                family.metric,
                (
                    *before.numbers,
                    *(NumberPoint((label, *each.labels), each.value) for each in family.numbers),
                ),
                (*before.histograms, *(_labelled(each, label) for each in family.histograms)),
            )
    return list(families.values())


def _labelled(point: HistogramPoint, label: tuple[str, str]) -> HistogramPoint:
    return replace(point, labels=(label, *point.labels))


@dataclass(frozen=True, slots=True)
class Health:
    """What /healthz and /readyz say; `reasons`: why not."""

    ready: bool
    reasons: tuple[str, ...]
    engines: int

    def document(self) -> Mapping[str, Any]:
        return {"ready": self.ready, "reasons": list(self.reasons), "engines": self.engines}


class Listener:
    """`attend` once a second; the pages are answered in threads of the server's own."""

    def __init__(self, collect: Callable[[], list[Family]], health: Callable[[], Health]) -> None:
        """Both are called from other threads."""
        self._collect = collect
        self._health = health
        self._address: str | None = None
        self._guarded_by = ListenOptions()
        self._guard: Guard | None = None
        self._server: PageServer | None = None
        self._backoff = Backoff()
        self.reason = ""

    def set(self, address: str | None, guarded_by: ListenOptions) -> None:
        """Where to listen from the next `attend` on; what was bound before is let go."""
        if (address, guarded_by) == (self._address, self._guarded_by):
            return
        self.stop()
        self._address, self._guarded_by = address, guarded_by
        self._backoff.succeeded()

    def attend(self, now_ns: int) -> None:
        """Binds, where that has not been possible so far and it is time to try again."""
        if self._address is None or self._server is not None or not self._backoff.due(now_ns):
            return
        try:
            guard = Guard(self._guarded_by)
            server = PageServer(*parse_address(self._address), FLAG, guard, self._answer)
        except DsagentError as error:
            self._backoff.failed(now_ns)
            self.reason = f"{error}; tried again and again"  # no number: that would be news
            return
        self._guard, self._server = guard, server
        self._backoff.succeeded()
        self.reason = ""
        server.start("listener")

    @property
    def port(self) -> int | None:
        return None if self._server is None else self._server.port

    def describe(self) -> dict[str, Any]:
        """Its part of the document of `status`."""
        tally = None if self._server is None else self._server.tally
        state = "off" if self._address is None else "waiting" if tally is None else "ok"
        notice = "" if self._guard is None else self._guard.notice
        return {
            "address": self._address,
            "port": self.port,
            "state": state,
            "reason": self.reason or notice,
            "answered": 0 if tally is None else tally.answered,
            "failed": 0 if tally is None else tally.failed,
            "refused": 0 if tally is None else tally.refused,
        }

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop(1.0)

    def _answer(self, path: str, accept: str) -> Page:
        if path == "/metrics":
            openmetrics = "application/openmetrics-text" in accept
            text = render(self._collect(), openmetrics=openmetrics)
            return Page(200, OPENMETRICS_TYPE if openmetrics else CLASSIC_TYPE, text)
        if path == "/healthz":
            return Page(200, JSON_TYPE, json.dumps({"alive": True}) + "\n")
        if path == "/readyz":
            health = self._health()
            text = json.dumps(health.document(), indent=2) + "\n"
            return Page(200 if health.ready else 503, JSON_TYPE, text)
        return Page(404, CLASSIC_TYPE, "look at /metrics, /healthz or /readyz\n")
