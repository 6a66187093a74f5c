"""What the BPF programs keep in shared memory, turned into facts.

Pure views: arrays in, facts out. The layouts are in bpf/layout.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dsagent.agent.facts import FACT_DTYPE, Event, Facts, Kind, no_facts
from dsagent.agent.host.procfs import escape
from dsagent.agent.sources.bpf.layout import STATE_BITS
from dsagent.agent.sources.open_intervals import OpenIntervals

Table = npt.NDArray[np.void]

# Stops and lost CPUs are told as they go on; an idle thread's sleep only at doubling
# lengths, since an engine may have hundreds of idle threads.
_PIECE_NS = 50_000_000
_PIECE_KINDS = (Kind.RUNQUEUE, Kind.THROTTLED, Kind.STOPPED)
_SLEEP_PIECE_NS = 100_000_000
# Not facts: kinds from here on are told as events.
_NOTES_FROM = 64
_NOTES = {
    64: ("process.exec", "now runs another binary: {}"),
    65: ("memory.oom", "is killed to get its memory: {}"),
}
_OFF = (Kind.OFF_FUTEX, Kind.OFF_DISK, Kind.OFF_FSYNC, Kind.OFF_OTHER, Kind.STOPPED)


def comm_text(comm: bytes) -> str:
    """A task's name as the kernel keeps it, made fit to be shown."""
    return escape(comm.split(b"\0")[0].decode("utf-8", "replace"))


def split_notes(sent: Facts, threads: Table) -> tuple[Facts, list[Event]]:
    """The facts among what the kernel sent, and its notes as events."""
    notes = sent["kind"] >= _NOTES_FROM
    if not notes.any():
        return sent, []
    events = []
    for kind, pid, tid, at_ns in sent[notes][["kind", "pid", "tid", "start_ns"]].tolist():
        comm = next((comm_text(t["comm"]) for t in threads[threads["tid"] == tid]), "")
        if kind in _NOTES:
            name, text = _NOTES[kind]
            events.append(Event(name, at_ns, f"{pid} {text.format(comm)}", {"process.pid": pid}))
    return sent[~notes], events


def begun_since(sent: Facts, since_ns: int) -> Facts:
    """Without what the programs beside the scheduler's tell of the time before they were attached
    last: that something had begun, they may remember from the time before that."""
    stale = (sent["kind"] >= Kind.STEAL) & (sent["kind"] <= Kind.BLOCK_IO)
    kept: Facts = sent[~(stale & (sent["start_ns"] < since_ns))]
    return kept


def thread_sums(threads: Table, generation: int) -> Facts:
    """The sums of short intervals of one generation, which the kernel no longer touches."""
    sums = threads["sums"][:, generation & 1]
    mine = np.flatnonzero(sums["generation"] == generation)
    kinds = sums["kinds"][mine]
    rows, columns = np.nonzero(kinds["count"])
    if not rows.size:
        return no_facts()
    found = kinds[rows, columns]
    facts = np.zeros(rows.size, FACT_DTYPE)
    facts["kind"] = columns
    facts["cpu"] = -1
    facts["pid"] = threads["pid"][mine][rows]
    facts["tid"] = threads["tid"][mine][rows]
    facts["step_id"] = sums["step"][mine][rows]
    _copy_sum(facts, found)
    return facts


def foreign_sums(cpus: Table, generation: int, target_pid: int) -> Facts:
    """The short runs of tasks outside the target, per CPU and process."""
    sums = cpus["sums"][:, generation & 1]
    mine = np.flatnonzero(sums["generation"] == generation)
    by_pid = sums["by_pid"][mine]
    rows, columns = np.nonzero(by_pid["pid"])
    if not rows.size:
        return no_facts()
    found = by_pid[rows, columns]
    facts = np.zeros(rows.size, FACT_DTYPE)
    facts["kind"] = Kind.FOREIGN
    facts["cpu"] = mine[rows]
    facts["pid"] = target_pid
    facts["culprit_pid"] = found["pid"]
    facts["step_id"] = sums["step"][mine][rows]
    _copy_sum(facts, found)
    return facts


def _copy_sum(facts: Facts, found: Table) -> None:
    facts["exact"] = found["count"] == 1
    for field in ("count", "start_ns", "end_ns", "ns"):
        facts[field] = found[field]


def open_threads(threads: Table, told: OpenIntervals, until_ns: int, step: int) -> Facts:
    """New pieces of the threads' waits and stops that go on at `until_ns`."""
    word = threads["since_state"]
    kind = (word & ((1 << STATE_BITS) - 1)).astype(np.int64)
    start = (word >> STATE_BITS).astype(np.int64)
    woken = threads["waking_ns"].astype(np.int64)
    waits = np.isin(kind, _OFF) & (woken > start)  # made runnable, not switched in yet
    kind = np.where(waits, Kind.RUNQUEUE, kind)
    start = np.where(waits, woken, start)
    long = np.flatnonzero(
        np.isin(kind, (Kind.RUNQUEUE, Kind.THROTTLED, *_OFF)) & (until_ns - start >= _PIECE_NS)
    )
    pieces: list[tuple[Any, ...]] = []
    for n in long.tolist():
        key = (int(threads["tid"][n]), int(start[n]))
        begin = told.told_until(key)
        least = _PIECE_NS
        if kind[n] not in _PIECE_KINDS:
            least = max(_SLEEP_PIECE_NS, begin - key[1])
        if until_ns - begin < least:
            told.tell(key, begin)
            continue
        told.tell(key, until_ns)
        pieces.append(
            (kind[n], 1, -1, 1, threads["pid"][n], key[0], 0, 0, step, begin, until_ns,
             until_ns - begin)
        )  # fmt: skip
    return np.array(pieces, FACT_DTYPE) if pieces else no_facts()


def open_foreign(
    cpus: Table, told: OpenIntervals, until_ns: int, *, step: int, target_pid: int, least_ns: int
) -> Facts:
    """New pieces of the runs of foreign tasks that have a CPU at `until_ns`."""
    start = cpus["run_start_ns"].astype(np.int64)
    busy = np.flatnonzero(
        (cpus["watched"] != 0) & (cpus["foreign_pid"] != 0) & (start > 0)
        & (until_ns - start >= least_ns)
    )  # fmt: skip
    pieces: list[tuple[Any, ...]] = []
    for n in busy.tolist():
        key = (~n, int(start[n]))
        begin = told.told_until(key)
        if until_ns - begin < least_ns:
            told.tell(key, begin)
            continue
        told.tell(key, until_ns)
        pieces.append(
            (Kind.FOREIGN, 1, n, 1, target_pid, 0, cpus["foreign_pid"][n],
             cpus["running_tid"][n], step, begin, until_ns, until_ns - begin)
        )  # fmt: skip
    return np.array(pieces, FACT_DTYPE) if pieces else no_facts()
