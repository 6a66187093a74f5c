"""The engine's own metrics and the catalogue's list of them are the same."""

from __future__ import annotations

import math

from dsagent.agent.metrics.engine_metrics import ENGINE_METRICS
from dsagent.engine.metrics import EngineMetrics

Spelled = tuple[str, str, str, frozenset[str], tuple[float, ...]]


def spelled_by_the_engine() -> set[Spelled]:
    """Family, type, description, labels and bounds, read off a registry in use."""
    metrics = EngineMetrics()
    metrics.request_finished("stop")  # a labelled family shows nothing before
    found = set()
    for family in metrics.registry.collect():
        samples = [s for s in family.samples if not s.name.endswith("_created")]
        labels = {label for sample in samples for label in sample.labels} - {"le"}
        bounds = {float(s.labels["le"]) for s in samples if "le" in s.labels} - {math.inf}
        found.add(
            (
                family.name,
                family.type,
                family.documentation,
                frozenset(labels),
                tuple(sorted(bounds)),
            )
        )
    return found


def test_the_two_are_equal() -> None:
    listed = {
        (m.prometheus_family, m.kind, m.description, frozenset(m.attributes), m.bounds)
        for m in ENGINE_METRICS
    }
    assert spelled_by_the_engine() == listed
