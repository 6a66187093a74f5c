"""Who held the lock that a thread waited for. Pure: no I/O, no clock."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from dsagent.agent.attribution.fact_store import FactIndex
from dsagent.agent.facts import Facts, Kind

# A lock may go through some hands before it reaches the one that waits; for a wait below 1 ms it is
# not worth asking.
MOST_HANDS = 4
WORTH_ASKING_NS = 1_000_000
# Who waits for the interpreter's lock sleeps 5 ms at a time, and after a time-out sleeps again as
# soon as it has had the CPU.
SLEEPS_AGAIN_NS = 5_000_000


class Holders:
    """By the futex sleeps of one batch of facts."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    # Most batches need it not: it is made when a wait is long enough.
    @cached_property
    def _futex(self) -> FactIndex:
        chosen = (self._facts["kind"] == Kind.OFF_FUTEX) & (self._facts["exact"] == 1)
        return FactIndex(self._facts[chosen])

    def of(
        self, kind: int, tid: int, start_ns: int, end_ns: int, pid: int, culprit: int
    ) -> tuple[int, int]:
        """Who a wait of `tid` is to blame on. A sleep that timed out was ended by whoever ended
        the last one of its row. Who woke the sleeper may only have passed the lock on: one that
        itself slept through most of the wait was held up by whoever woke it."""
        if kind != Kind.OFF_FUTEX or end_ns - start_ns < WORTH_ASKING_NS:
            return pid, culprit
        for _ in range(MOST_HANDS):
            if not culprit:
                end_ns, pid, culprit = self._ended_by(tid, end_ns)
            if not culprit:
                break
            near = self._futex.overlapping(start_ns, end_ns)
            own = near[near["tid"] == culprit]
            overlap = np.minimum(own["end_ns"], end_ns) - np.maximum(own["start_ns"], start_ns)
            if 2 * int(overlap.sum()) < end_ns - start_ns:
                break
            last = own[-1]
            tid, end_ns = culprit, int(last["end_ns"])
            pid, culprit = int(last["culprit_pid"]), int(last["culprit_tid"])
        return pid, culprit

    def _ended_by(self, tid: int, end_ns: int) -> tuple[int, int, int]:
        """When, and by whose pid and tid, the row of sleeps ended of which one of `tid` timed out
        at `end_ns`; the two are 0 where nobody is known."""
        near = self._futex.overlapping(end_ns, self._futex.end_ns)
        own = near[near["tid"] == tid]
        for start, end, pid, culprit in own[
            ["start_ns", "end_ns", "culprit_pid", "culprit_tid"]
        ].tolist():
            if start - end_ns > SLEEPS_AGAIN_NS:
                break
            end_ns = end
            if culprit:
                return end, pid, culprit
        return end_ns, 0, 0
