"""What the sidecar says of itself on its page of metrics. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dsagent.agent.metrics import sidecar_metrics as metrics
from dsagent.agent.metrics.metric import Metric
from dsagent.agent.metrics.series import Family, NumberPoint


@dataclass(frozen=True, slots=True)
class Figures:
    """At one moment. None: there is no limit."""

    states: tuple[str, ...]  # one for each engine
    restarts: int
    taken: int
    refused: int
    is_stale: bool
    used_bytes: int | None
    limit_bytes: int | None
    relief_level: int


def families(figures: Figures) -> list[Family]:
    states = Counter({"watching": 0, "waiting": 0})
    states.update(figures.states)
    read = (("taken", figures.taken), ("refused", figures.refused))
    shown: list[tuple[Metric, Iterable[NumberPoint]]] = [
        (metrics.SIDECAR_ENGINES, (_point(n, "state", state) for state, n in states.items())),
        (metrics.SIDECAR_RESTARTS, [_point(figures.restarts)]),
        (metrics.SIDECAR_SETTINGS_READ, (_point(n, "result", result) for result, n in read)),
        (metrics.SIDECAR_SETTINGS_STALE, [_point(figures.is_stale)]),
        (metrics.SIDECAR_MEMORY_RELIEF, [_point(figures.relief_level)]),
    ]
    for metric, value in (
        (metrics.SIDECAR_MEMORY_USAGE, figures.used_bytes),
        (metrics.SIDECAR_MEMORY_LIMIT, figures.limit_bytes),
    ):
        if value is not None:
            shown.append((metric, [_point(value)]))
    return [Family(metric, tuple(points)) for metric, points in shown]


def _point(value: float, label: str = "", label_value: str = "") -> NumberPoint:
    return NumberPoint(((label, label_value),) if label else (), float(value))
