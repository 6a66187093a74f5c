"""Gives back what a recording was made of, poll by poll, as the sources once brought it.

The tables are read a segment at a time, so memory is bounded by a segment, not
by the recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dsagent.agent.facts import FACT_DTYPE, Facts, Kind, Readings, View, no_facts
from dsagent.agent.sinks import schema
from dsagent.agent.sinks.reader import request_record
from dsagent.agent.sinks.recording_meta import read_meta
from dsagent.agent.sinks.tables import (
    Unreadable,
    closed_segments,
    making_sense_of,
    must,
    read_table,
    tell,
    tell_left_out,
)
from dsagent.instrumentation.records import (
    Admission,
    Phase,
    RankStep,
    RequestOpen,
    RequestRecord,
    Share,
    Step,
)

if TYPE_CHECKING:
    import pyarrow as pa

_PHASES = {phase.name.lower(): phase for phase in Phase}
_ADMISSIONS = {admission.name.lower(): admission for admission in Admission}
_KINDS = {kind.name.lower(): int(kind) for kind in Kind}
_UNKNOWN_KIND = 255
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Poll:
    """What came in together, and the time by which requests were due then."""

    due_ns: int
    readings: Readings
    view: View = field(default_factory=View)  # by which it was accounted for


@dataclass(frozen=True, slots=True)
class Run:
    """One attachment's part of a recording; times are CLOCK_MONOTONIC nanoseconds."""

    attached_ns: int
    polls: Iterator[Poll]


def read_runs(directory: str | Path, *, tell: Callable[[str], None] = tell) -> Iterator[Run]:
    """The runs, the oldest first; the polls of one are to be taken before the next run is.

    A request is among `closed` at the poll that accounted for it. A segment that cannot be read is
    left out and told. Raises DsagentError (exit 2) where there is no recording, or a run of which
    nothing can be read.
    """
    folder = Path(directory)
    runs = [run for run in read_meta(folder)["runs"] if _has_written(run)]
    segments = closed_segments(folder)
    firsts = [run["first_segment"] for run in runs]
    ends = [*firsts[1:], 1 << 62][: len(firsts)]
    for run, first, end in zip(runs, firsts, ends, strict=True):
        mine = [files for number, files in sorted(segments.items()) if first <= number < end]
        yield Run(run["attached_ns"], _polls(mine, tell))


def _has_written(run: Mapping[str, Any]) -> bool:
    return type(run.get("attached_ns")) is int and type(run.get("first_segment")) is int


def _polls(segments: list[dict[str, Path]], tell: Callable[[str], None]) -> Iterator[Poll]:
    left_out: list[str] = []
    for files in segments:
        try:
            yield from _segment(files)
        except FileNotFoundError:
            continue  # the running agent has just removed its oldest segment
        except Unreadable as why:
            left_out.append(str(why))
    tell_left_out(left_out, len(segments), tell)


def _segment(files: Mapping[str, Path]) -> Iterator[Poll]:
    """Raises Unreadable before the first poll of a segment, or not at all."""

    def made(table: schema.Table, make: Callable[[pa.Table], list[Any]]) -> list[Any]:
        path = files.get(table.name)
        if path is None:
            return []
        with making_sense_of(path):
            return make(read_table(path, table))

    shares = made(schema.SHARES, _shares)
    opens = made(schema.OPENS, _opens)
    ranks = made(schema.RANKS, _ranks)
    steps = made(schema.STEPS, lambda table: _steps(table, shares))
    closed = made(schema.REQUESTS, _requests)
    facts, names = next(iter(made(schema.KERNEL, lambda table: [_facts(table)])), (no_facts(), []))
    polls = made(schema.POLLS, lambda table: table.to_pylist())
    wanted = {
        "opens": len(opens),
        "ranks": len(ranks),
        "steps": len(steps),
        "kernel": len(facts),
        "requests": len(closed),
    }
    with making_sense_of(next(iter(files.values()))):
        for name, there in wanted.items():
            must(all(poll[name] >= 0 for poll in polls))
            must(sum(poll[name] for poll in polls) == there)
    each = {"opens": iter(opens), "ranks": iter(ranks), "steps": iter(steps)}
    requests, at = iter(closed), 0
    named = deque(names)
    for poll in polls:
        reached = at + poll["kernel"]
        fresh = {}
        while named and named[0][0] < reached:
            _, number, fresh[number] = named.popleft()
        opened, rank_steps, done = (list(islice(each[n], poll[n])) for n in each)
        yield Poll(
            poll["due_ns"],
            Readings(
                steps=done,
                rank_steps=rank_steps,
                opened=opened,
                closed=list(islice(requests, poll["requests"])),
                facts=facts[at:reached],
                facts_complete_ns=poll["facts_complete_ns"],
                names=fresh,
            ),
            View(
                poll["waits_for_kernel"], tuple(poll["not_looked_at"]), poll["not_looked_since_ns"]
            ),
        )
        at = reached


def _column(table: pa.Table, name: str) -> list[Any]:
    values: list[Any] = table[name].to_numpy().tolist()
    return values


def _members(table: pa.Table, name: str, by_name: Mapping[str, _T]) -> list[_T]:
    """A column of names as what they name; each name is looked up once."""
    column = table[name].combine_chunks().dictionary_encode()
    known = [by_name[each] for each in column.dictionary.to_pylist()]
    return [known[code] for code in column.indices.to_numpy().tolist()]


def _shares(table: pa.Table) -> list[Share]:
    """In the order of their steps, which is that of the rows."""
    numbers = ("scheduled_tokens", "cached_tokens", "context_tokens", "output_tokens")
    for name in numbers:
        must(len(table) == 0 or table[name].to_numpy().min() >= 0)
    return list(
        map(
            Share,
            _column(table, "request_key"),
            _members(table, "phase", _PHASES),
            *(_column(table, name) for name in numbers),
            _column(table, "recompute"),
        )
    )


def _steps(table: pa.Table, shares: list[Share]) -> list[Step]:
    own = ("shares", "admission", "graph")
    names = [f.name for f in fields(Step) if f.name not in own and f.name in table.column_names]
    columns = {name: _column(table, name) for name in names}
    must(all(0 <= s <= e for s, e in zip(columns["start_ns"], columns["end_ns"], strict=True)))
    must(all(min(columns[name], default=0) >= 0 for name in names if name.endswith("_ns")))
    columns["graph"] = _column(table, "graph")
    columns["admission"] = _members(table, "admission", _ADMISSIONS)
    sizes = [
        size - omitted
        for size, omitted in zip(
            _column(table, "batch_size"), columns["shares_omitted"], strict=True
        )
    ]
    must(all(size >= 0 for size in sizes) and sum(sizes) == len(shares))
    rest = iter(shares)
    columns["shares"] = [tuple(islice(rest, size)) for size in sizes]
    in_order = [f.name for f in fields(Step) if f.name in columns]
    return list(map(Step, *(columns[name] for name in in_order)))


def _ranks(table: pa.Table) -> list[RankStep]:
    return [RankStep(**row) for row in table.to_pylist()]


def _opens(table: pa.Table) -> list[RequestOpen]:
    known = {field.name for field in fields(RequestOpen)}
    opens = []
    for row in table.to_pylist():
        parent = row["parent_span_id"]
        row["trace_id"], row["span_id"] = int(row["trace_id"], 16), int(row["span_id"], 16)
        row["parent_span_id"] = None if parent is None else int(parent, 16)
        opens.append(RequestOpen(**{name: row[name] for name in known & row.keys()}))
    return opens


def _requests(table: pa.Table) -> list[RequestRecord]:
    return [request_record(row) for row in table.to_pylist()]


def _facts(table: pa.Table) -> tuple[Facts, list[tuple[int, int, str]]]:
    """The facts, and `_names` of them."""
    facts = np.empty(len(table), FACT_DTYPE)
    kinds = table["kind"].combine_chunks().dictionary_encode()
    codes = [_KINDS.get(kind, _UNKNOWN_KIND) for kind in kinds.dictionary.to_pylist()]
    facts["kind"] = np.array(codes, np.uint8)[kinds.indices.to_numpy()]
    for name in FACT_DTYPE.names or ():
        if name != "kind":
            column = table[name].to_numpy()
            facts[name] = column
            must((facts[name] == column).all())
    must((facts["start_ns"] <= facts["end_ns"]).all() and (facts["ns"] >= 0).all())
    return facts, _names(table)


def _names(table: pa.Table) -> list[tuple[int, int, str]]:
    """(row, thread or process, its name from that row on), in the order of the rows."""
    import pyarrow as pa

    table = table.append_column("row", pa.array(np.arange(len(table))))
    found = set()
    for number, name in (
        ("tid", "thread"),
        ("culprit_pid", "culprit"),
        ("culprit_tid", "culprit_thread"),
    ):
        first = table.group_by([number, name]).aggregate([("row", "min")])
        columns = (first[each].to_pylist() for each in ("row_min", number, name))
        found |= {row for row in zip(*columns, strict=True) if row[1] and row[2] is not None}
    return sorted(found)
