"""What anyone could do without a model: the fact whose z-score moved most names the cause.

Each request gets one number a fact: how much of it fell into its life. Mean and
deviation come from the requests to which nothing was done, which is more than a
real user would know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dsagent.agent.attribution.account import Account

KERNEL_CAUSES = {
    "runqueue": "cpu.runqueue",
    "throttled": "cpu.throttled",
    "steal": "cpu.steal",
    "irq": "cpu.irq",
    "off_futex": "lock.wait",
    "off_disk": "io.block",
    "stopped": "process.stopped",
    "major_fault": "memory.major_fault",
    "minor_fault": "memory.minor_fault",
    "reclaim": "memory.reclaim",
    "retransmit": "net.retransmit",
    "backpressure": "net.backpressure",
}
Times = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Fact:
    """When something happened, and how much of it."""

    ends: Times
    total: Times  # running sum, one longer than ends

    def within(self, start_ns: int, end_ns: int) -> float:
        low, high = np.searchsorted(self.ends, [start_ns, end_ns])
        return float(self.total[high] - self.total[low])


@dataclass(slots=True)
class Facts:
    """The facts of one recording, and how they usually are."""

    by_cause: dict[str, _Fact]
    usual: dict[str, tuple[float, float]] = field(default_factory=dict)  # mean, deviation


def read_facts(directory: Path) -> Facts:
    kernel, steps = _table(directory, "kernel"), _table(directory, "steps")
    by_cause = {
        cause: _fact(kernel.filter(pc.equal(kernel["kind"], kind)), "end_ns", "ns")
        for kind, cause in KERNEL_CAUSES.items()
    }
    by_cause["queue.wait"] = _fact(steps, "end_ns", "waiting")
    by_cause["preempted"] = _fact(steps, "end_ns", "preempted")
    by_cause["batch.prefill_interference"] = _fact(steps, "end_ns", "prefill_tokens")
    by_cause["engine.host"] = _fact(steps, "end_ns", "sample_ns")
    return Facts(by_cause)


def _table(directory: Path, name: str) -> pa.Table:
    files = sorted(p for p in directory.rglob(f"*{name}*.parquet"))
    return pa.concat_tables([pq.read_table(path, partitioning=None) for path in files])


def _fact(table: pa.Table, at: str, how_much: str) -> _Fact:
    ends = table[at].to_numpy()
    order = np.argsort(ends, kind="stable")
    sizes = table[how_much].to_numpy()[order]
    return _Fact(ends[order], np.concatenate([[0], np.cumsum(sizes)]))


_OWN: dict[str, Callable[[Account], float]] = {
    "frontend.in": lambda a: (a.record.queued_ns or a.record.sent_ns) - a.record.received_ns,
    "frontend.out": lambda a: a.record.sent_ns - (a.record.finished_ns or a.record.sent_ns),
    "prefill.compute": lambda a: (a.record.prompt_tokens or 0) - (a.record.cached_tokens or 0),
    "decode.compute": lambda a: a.record.output_tokens,
}


def values(facts: Facts, account: Account) -> dict[str, float]:
    record = account.record
    found = {
        cause: fact.within(record.received_ns, record.sent_ns)
        for cause, fact in facts.by_cause.items()
    }
    return found | {cause: float(own(account)) for cause, own in _OWN.items()}


def learn(facts: Facts, unharmed: Collection[Account]) -> None:
    rows = [values(facts, account) for account in unharmed]
    for cause in rows[0] if rows else ():
        column = [row[cause] for row in rows]
        facts.usual[cause] = fmean(column), pstdev(column)


def top_cause(facts: Facts, account: Account) -> str | None:
    """The cause of the fact that moved most; None where none is known."""
    best: tuple[float, str] | None = None
    for cause, value in values(facts, account).items():
        mean, deviation = facts.usual.get(cause, (0.0, 0.0))
        least = max(deviation, 0.01 * abs(mean), 1.0)  # of what never moves, any move counts
        moved = abs(value - mean) / least
        if best is None or moved > best[0]:
            best = moved, cause
    return None if best is None else best[1]
