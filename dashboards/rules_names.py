"""How rules spell things: durations, numbers, quoted texts, the names of recorded series."""

from __future__ import annotations

from dsagent.agent.metrics.slo_metrics import SLO_BAD, SLO_BURNT, SLO_EVENTS


def duration(seconds: float) -> str:
    """As Prometheus writes it: 5m, 2500ms."""
    ms = round(seconds * 1000)
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


def number(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".") or "0"


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def recorded(what: str, seconds: float) -> str:
    """The name of a recorded series: `events`, `bad` or their `ratio` over a window, or the
    `causes` of the time that was burnt in it, as ratios."""
    metric = {"events": SLO_EVENTS, "causes": SLO_BURNT}.get(what, SLO_BAD)
    operation = "ratio" if what in ("ratio", "causes") else "increase"
    family = metric.prometheus.removesuffix("_total")
    return f"slo:{family}:{operation}{duration(seconds)}"
