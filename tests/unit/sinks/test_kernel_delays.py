"""One observation a step and kind, however the facts come in; and steps by their size."""

from __future__ import annotations

import numpy as np
import pytest
from made import MS, batch, step

from dsagent.agent.facts import FACT_DTYPE, Facts, Kind
from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.aggregate import Aggregate, size_class
from dsagent.agent.metrics.kernel_delays import MAX_HELD, KernelDelays
from dsagent.agent.metrics.metric import Metric
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.slo import Limits


def facts(*rows: tuple[int, Kind, int]) -> Facts:
    """(step, kind, ns) each."""
    made = np.zeros(len(rows), FACT_DTYPE)
    for at, (step_id, kind, ns) in enumerate(rows):
        made[at]["step_id"], made[at]["kind"], made[at]["ns"] = step_id, kind, ns
    return made


def test_threads_of_a_step_are_summed_over_the_batches_that_bring_them() -> None:
    delays = KernelDelays()
    first = facts((7, Kind.RUNQUEUE, 3 * MS), (7, Kind.RUNQUEUE, 4 * MS), (7, Kind.IRQ, MS))
    assert list(delays.add(first)) == []
    assert list(delays.add(facts((7, Kind.RUNQUEUE, 5 * MS)))) == [("irq", MS)]
    assert list(delays.add(facts())) == [("runqueue", 12 * MS)]
    assert list(delays.add(facts())) == []


def test_running_sleeping_and_strangers_are_no_delay_and_no_step_is_none() -> None:
    delays = KernelDelays()
    for kind in (Kind.ONCPU, Kind.OFF_OTHER, Kind.FOREIGN):
        list(delays.add(facts((7, kind, MS))))
    list(delays.add(facts((0, Kind.RUNQUEUE, MS))))
    assert list(delays.add(facts())) == []


def test_what_is_held_is_bounded() -> None:
    delays = KernelDelays()
    storm = facts(*((number, Kind.IRQ, 1) for number in range(1, MAX_HELD + 100)))
    list(delays.add(storm))
    assert delays.dropped == 99
    assert len(list(delays.add(facts()))) == MAX_HELD


def test_what_was_not_held_is_shown() -> None:
    state = Aggregate(Limits(), Sampler(rate=0.0), {})
    storm = facts(*((number, Kind.IRQ, 1) for number in range(1, MAX_HELD + 4)))
    state.add(batch(facts=storm))
    (family,) = (each for each in state.collect() if each.metric is catalog.KERNEL_DELAYS_DROPPED)
    assert [point.value for point in family.numbers] == [3]


@pytest.mark.parametrize(
    ("size", "name"), [(0, "1"), (1, "1"), (2, "2"), (3, "4"), (1024, "1024"), (1025, "+Inf")]
)
def test_a_class_is_named_by_its_upper_bound(size: int, name: str) -> None:
    assert size_class(size, catalog.BATCH_CLASSES) == name


def counts(state: Aggregate, metric: Metric) -> dict[str, int]:
    (family,) = (each for each in state.collect() if each.metric is metric)
    return {point.labels[0][1]: sum(point.counts) for point in family.histograms}


def test_steps_are_counted_by_batch_by_context_and_by_what_the_kernel_took() -> None:
    state = Aggregate(Limits(), Sampler(rate=0.0), {})
    three = ("a", "b", "c")
    omitted = step(3, three, shares_omitted=1)  # its context is not known
    state.add(
        batch(steps=(step(1), step(2, three), omitted), facts=facts((1, Kind.THROTTLED, 20 * MS)))
    )
    state.add(batch())
    assert counts(state, catalog.STEP_DURATION_BY_BATCH) == {"1": 1, "4": 2}
    assert counts(state, catalog.STEP_DURATION_BY_CONTEXT) == {"256": 2}
    assert counts(state, catalog.KERNEL_DELAY) == {"throttled": 1}
