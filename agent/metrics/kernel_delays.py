"""What the kernel did to each step of the engine, as a histogram: one observation a step and kind.

The facts of a step may come in with two batches; they are held until a batch brings no more of
them, so that one step is one observation. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dsagent.agent.facts import Facts, Kind
from dsagent.agent.metrics.metric import Metric

KERNEL_DELAY = Metric(
    "dsagent.kernel.step.delay",
    "histogram",
    "s",
    "What the kernel took from the target's threads in one step, summed over them, by kind.",
    ("kind",),
    (1e-5, 3e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
)
KERNEL_DELAYS_DROPPED = Metric(
    "dsagent.kernel.step.delays_dropped",
    "counter",
    "{observation}",
    "Observations missing from dsagent.kernel.step.delay: too many steps were held at once.",
)
KERNEL_METRICS = (KERNEL_DELAY, KERNEL_DELAYS_DROPPED)

# Sleeps are no delay (OFF_OTHER), running is none (ONCPU), and what others ran is not the target's.
KINDS = {
    kind: kind.name.lower()
    for kind in (
        Kind.RUNQUEUE,
        Kind.THROTTLED,
        Kind.STOPPED,
        Kind.STEAL,
        Kind.IRQ,
        Kind.MAJOR_FAULT,
        Kind.MINOR_FAULT,
        Kind.RECLAIM,
        Kind.OFF_DISK,
        Kind.OFF_FSYNC,
        Kind.OFF_FUTEX,
    )
}
MAX_HELD = 4096  # sums of steps not finished; the kernel's tables hold fewer

_KIND_BITS = 8  # of a sum's key, below the step's id
_KIND_VALUES = np.array([int(kind) for kind in KINDS], np.uint8)


class KernelDelays:
    """Facts in, finished sums out."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # key → ns
        self.dropped = 0  # what came of a sum that was not held for want of room

    def add(self, facts: Facts) -> Iterator[tuple[str, int]]:
        """Takes a batch's facts in, and yields (kind, ns) of what no fact of it belongs to.
        What happened outside of any step is left out."""
        came = self._sums(facts)
        for key in [key for key in self._held if key not in came]:
            yield KINDS[Kind(key & (1 << _KIND_BITS) - 1)], self._held.pop(key)
        for key, ns in came.items():
            if key in self._held or len(self._held) < MAX_HELD:
                self._held[key] = self._held.get(key, 0) + ns
            else:
                self.dropped += 1

    @staticmethod
    def _sums(facts: Facts) -> dict[int, int]:
        facts = facts[(facts["step_id"] != 0) & np.isin(facts["kind"], _KIND_VALUES)]
        if not len(facts):
            return {}
        keys = (facts["step_id"] << np.uint64(_KIND_BITS)) | facts["kind"].astype(np.uint64)
        different, which = np.unique(keys, return_inverse=True)
        sums = np.bincount(which, weights=facts["ns"].astype(np.float64))
        return dict(zip(different.tolist(), sums.astype(np.int64).tolist(), strict=True))
