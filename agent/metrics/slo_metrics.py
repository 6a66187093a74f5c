"""The metrics of objectives, and how the evaluator's state becomes them.

Rules are written on `dsagent.slo.events` and `dsagent.slo.bad`: two counters
that begin together at 0, so that their ratio is never that of one to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from dsagent.agent.metrics.metric import Metric
from dsagent.agent.slo.policy import burn_rate
from dsagent.instrumentation import names

if TYPE_CHECKING:
    from dsagent.agent.metrics.series import Store
    from dsagent.agent.slo.evaluator import Evaluator, Series

SHOWN_EVERY_NS = 1_000_000_000

_SERIES = ("slo", "objective", names.REQUEST_MODEL, "tenant", "prompt_class")
_CIRCUIT = ("cache_name", "action")

SLO_EVENTS = Metric(
    "dsagent.slo.events",
    "counter",
    "{request}",
    "Requests that an objective was judged by.",
    _SERIES,
)
SLO_BAD = Metric(
    "dsagent.slo.bad", "counter", "{request}", "Those of them that did not meet it.", _SERIES
)
SLO_OBJECTIVE = Metric(
    "dsagent.slo.objective",
    "gauge",
    "1",
    "The ratio of requests that shall meet it, such as 0.99.",
    _SERIES,
)
SLO_BURN_RATE = Metric(
    "dsagent.slo.burn_rate",
    "gauge",
    "1",
    "How many times faster than allowed the budget burnt over this window; none without requests.",
    (*_SERIES, "window"),
)
SLO_STATE = Metric(
    "dsagent.slo.state",
    "gauge",
    "{state}",
    "1 for the state that the agent's own evaluator finds: ok, ticket, page, not_enough_data, "
    "blind.",
    (*_SERIES, "state"),
)
SLO_BURNT = Metric(
    "dsagent.slo.burnt.cause",
    "counter",
    "s",
    "What violating requests took beyond the usual, by cause.",
    (*_SERIES, "cause"),
)
SLO_BLIND = Metric(
    "dsagent.slo.blind", "gauge", "{state}", "1 while the agent cannot see the server's requests."
)
CACHE_CIRCUIT = Metric(
    "dsagent.slo.cache.circuit",
    "gauge",
    "{state}",
    "1 while the circuit is open: the hit ratio was too low for the time set.",
    _CIRCUIT,
)
CACHE_HIT_RATIO = Metric(
    "dsagent.slo.cache.hit",
    "gauge",
    "1",
    "Hit ratio that the circuit judges: tokens found in the cache, of those asked for.",
    _CIRCUIT,
)

SLO_METRICS = (
    SLO_EVENTS,
    SLO_BAD,
    SLO_OBJECTIVE,
    SLO_BURN_RATE,
    SLO_STATE,
    SLO_BURNT,
    SLO_BLIND,
    CACHE_CIRCUIT,
    CACHE_HIT_RATIO,
)


class SloFigures:
    """Shows an evaluator's state in stores, in each once a second."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        # When, in each: there are as many as sinks, and an evaluator outlives those of its engine.
        self._shown_ns: WeakKeyDictionary[Store, int] = WeakKeyDictionary()

    def show(self, store: Store) -> None:
        evaluator = self._evaluator
        shown_ns = self._shown_ns.get(store)
        if shown_ns is not None and evaluator.now_ns - shown_ns < SHOWN_EVERY_NS:
            return
        self._shown_ns[store] = evaluator.now_ns
        store.set(SLO_BLIND, float(evaluator.is_blind), {})
        store.clear(SLO_BURN_RATE)
        for series in evaluator.series.values():
            self._show_series(store, series)
        store.clear(CACHE_HIT_RATIO)
        for circuit in evaluator.circuits:
            labels = {"cache_name": circuit.alert.name, "action": circuit.alert.action}
            store.set(CACHE_CIRCUIT, float(circuit.is_open), labels)
            if circuit.hit_ratio is not None:
                store.set(CACHE_HIT_RATIO, circuit.hit_ratio, labels)

    def _show_series(self, store: Store, series: Series) -> None:
        from dsagent.agent.slo.evaluator import STATES

        evaluator = self._evaluator
        labels = {**series.key.labels(), names.REQUEST_MODEL: series.key.model}
        store.set(SLO_EVENTS, series.events, labels)
        store.set(SLO_BAD, series.bad, labels)
        store.set(SLO_OBJECTIVE, 1 - series.budget_ratio, labels)
        now = "blind" if evaluator.is_blind else series.state(evaluator.now_ns)
        for state in STATES:
            store.set(SLO_STATE, float(state == now), {**labels, "state": state})
        for length_s in evaluator.shown_lengths_s:
            events, bad = series.counts[length_s].counts(evaluator.now_ns)
            burn = burn_rate(bad, events, series.budget_ratio)
            if burn is not None:
                store.set(SLO_BURN_RATE, burn, {**labels, "window": f"{length_s:g}s"})
        for cause, seconds in series.burnt_s.items():
            store.set(SLO_BURNT, seconds, {**labels, "cause": cause})
