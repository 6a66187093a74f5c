"""A recording as large as is asked for, made up by a seeded generator: nothing of it was measured.

An engine of 8 places at about 100 steps a second: each place serves one request after the other
with pauses between, so 4 to 8 are in a batch. Ten kernel facts a step, as the kernel source sends
them: sums of what ran, waited and was interrupted; in one step of fifty a hog takes a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dsagent.agent.sinks import schema
from dsagent.agent.sinks.recording_meta import new_meta, write_meta

PLACES = 8
STEPS_A_POLL = 40
STEPS_A_SEGMENT = 20_000
PID, LOOP, TEAM, FRONT, HOG = 100, 101, 102, 100, 900
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Requests:
    """All requests, by place and in order; steps count from 0, `end` is behind the last."""

    first: Numbers
    end: Numbers
    prompt: Numbers
    key: npt.NDArray[np.uint64]


def write_recording(folder: Path, steps: int, seed: int = 1) -> dict[str, int]:
    """Rows by table."""
    dice = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    places = [_one_place(dice, steps) for _ in range(PLACES)]
    counts: dict[str, int] = {}
    reached_ns = 1_000_000_000
    ends: dict[int, tuple[int, int, int]] = {}  # key → received, first scheduled, first token
    for number, low in enumerate(range(0, steps, STEPS_A_SEGMENT), 1):
        high = min(low + STEPS_A_SEGMENT, steps)
        tables, reached_ns = _segment(dice, places, low, high, reached_ns, ends)
        for table, columns in tables.items():
            arrow = table.arrow()
            length = len(next(iter(columns.values())))
            arrays = [_array(columns.get(field.name), field, length) for field in arrow]
            path = folder / f"{table.name}-{number:08d}.parquet"
            pq.write_table(pa.Table.from_arrays(arrays, schema=arrow), path, compression="zstd")
            counts[table.name] = counts.get(table.name, 0) + length
    meta = new_meta()
    meta["runs"] = [{"attached_ns": 1, "first_segment": 1, "synthetic": True}]
    write_meta(folder, meta)
    return counts


def _array(values: Any, field: pa.Field, length: int) -> pa.Array:
    """What is not given is nothing: 0, empty, or null where that may be."""
    if values is not None:
        return pa.array(values, field.type)
    nothing: dict[str, Any] = {"string": "", "bool": False, "double": None}
    fallback = [] if pa.types.is_list(field.type) else nothing.get(str(field.type), 0)
    return pa.array([fallback] * length, field.type)


def _one_place(dice: np.random.Generator, steps: int) -> _Requests:
    count = steps // 100 + 10
    lengths = dice.integers(60, 261, count)
    first = np.cumsum(lengths + dice.integers(0, 120, count)) - lengths
    keys = dice.integers(1, 1 << 63, count).astype(np.uint64)
    return _Requests(first, first + lengths, dice.integers(10, 401, count), keys)


def _segment(
    dice: np.random.Generator,
    places: list[_Requests],
    low: int,
    high: int,
    reached_ns: int,
    ends: dict[int, tuple[int, int, int]],
) -> tuple[dict[schema.Table, dict[str, Any]], int]:
    """The tables of the steps [low, high), and the end of the last one."""
    count = high - low
    step = np.arange(low, high)
    serves = np.zeros((count, PLACES), np.bool_)
    key = np.zeros((count, PLACES), np.uint64)
    prompt, done = np.zeros((2, count, PLACES), np.int64)
    for place, requests in enumerate(places):
        index = np.maximum(np.searchsorted(requests.first, step, "right") - 1, 0)
        serves[:, place] = (step >= requests.first[index]) & (step < requests.end[index])
        key[:, place], prompt[:, place] = requests.key[index], requests.prompt[index]
        done[:, place] = step - requests.first[index]
    prefills = serves & (done == 0)
    prefill_tokens = np.where(prefills, prompt, 0).sum(axis=1)
    decodes = (serves & ~prefills).sum(axis=1)
    hogged = np.where(dice.random(count) < 0.02, dice.integers(300_000, 3_000_000, count), 0)
    queued = dice.exponential(8000, count).astype(np.int64)
    pass_ns = (6_000_000 + 150_000 * decodes + 60_000 * prefill_tokens).astype(np.float64)
    forward = (pass_ns * dice.uniform(1, 1.05, count)).astype(np.int64) + queued + hogged
    gap = dice.integers(20_000, 60_000, count)
    length = forward + 300_000 + dice.integers(0, 30_000, count)
    end = reached_ns + np.cumsum(gap + length)
    start = end - length
    rows, columns = np.nonzero(serves)
    is_first = prefills[rows, columns]
    tables: dict[schema.Table, dict[str, Any]] = {
        schema.STEPS: {
            "engine_id": np.ones(count, np.uint64), "step_id": (step + 1).astype(np.uint64),
            "pid": np.full(count, PID), "tid": np.full(count, LOOP),
            "start_unix_ns": start, "start_ns": start, "end_ns": end,
            "schedule_ns": np.full(count, 100_000), "prepare_ns": np.full(count, 50_000),
            "forward_ns": forward, "sample_ns": np.full(count, 100_000),
            "output_ns": np.full(count, 50_000), "prefill_tokens": prefill_tokens,
            "decode_tokens": decodes, "running": serves.sum(axis=1),
            "admission": ["admitted"] * count, "batch_size": serves.sum(axis=1),
        },
        schema.SHARES: {
            "engine_id": np.ones(len(rows), np.uint64),
            "step_id": (step[rows] + 1).astype(np.uint64),
            "request_key": key[rows, columns],
            "phase": np.where(is_first, "prefill", "decode"),
            "scheduled_tokens": np.where(is_first, prompt[rows, columns], 1),
            "context_tokens": np.where(is_first, 0, (prompt + done - 1)[rows, columns]),
            "output_tokens": np.ones(len(rows), np.int64),
        },
        schema.KERNEL: _facts(dice, step, start + 150_000, forward, queued, hogged),
    }  # fmt: skip
    opened, closed = _requests(dice, places, low, high, start, end, ends)
    tables[schema.OPENS], tables[schema.REQUESTS] = opened, closed
    tables[schema.POLLS] = _polls(low, high, end, tables)
    for columns_of in (opened, closed):
        del columns_of["step"]
    return tables, int(end[-1])


def _facts(
    dice: np.random.Generator,
    step: Numbers,
    start: Numbers,
    forward: Numbers,
    queued: Numbers,
    hogged: Numbers,
) -> dict[str, Any]:
    count = len(step)
    everywhere, by_hog = np.arange(count), np.flatnonzero(hogged)
    quiet = np.flatnonzero(hogged == 0)
    small = dice.integers(500, 5000, (2, count))
    strangers = HOG + 1 + dice.integers(0, 4, count)
    parts: list[tuple[str, bool, int, Any, Numbers, Numbers]] = [
        ("oncpu", False, LOOP, 0, everywhere, forward * 95 // 100),
        ("oncpu", False, TEAM, 0, everywhere, forward * 94 // 100),
        ("oncpu", False, FRONT, 0, everywhere, np.full(count, 50_000)),
        ("runqueue", False, LOOP, 0, everywhere, queued),
        ("runqueue", False, TEAM, 0, everywhere, queued // 2),
        ("irq", False, LOOP, 0, everywhere, small[0]),
        ("minor_fault", False, LOOP, 0, everywhere, small[1]),
        ("off_futex", False, TEAM, 0, everywhere, np.full(count, 200_000)),
        ("foreign", False, 0, strangers, everywhere, dice.integers(5000, 100_000, count)),
        ("off_other", False, FRONT, 0, quiet, np.full(len(quiet), 4_000_000)),
        ("runqueue", True, TEAM, HOG, by_hog, hogged[by_hog]),
        ("foreign", True, 0, HOG, by_hog, hogged[by_hog]),
    ]
    rows = np.concatenate([rows for *_, rows, _ in parts])
    order = np.argsort(rows, kind="stable")
    rows = rows[order]

    def column(each: int) -> npt.NDArray[Any]:
        values = [np.broadcast_to(part[each], len(part[4])) for part in parts]
        return np.concatenate(values)[order]

    exact, tid, culprit, ns = column(1), column(2), column(3), column(5)
    names = {LOOP: "engine-loop", TEAM: "engine-team", FRONT: "engine", HOG: "hog"}
    begin = start[rows]
    return {
        "kind": column(0), "exact": exact, "cpu": np.full(len(rows), -1), "count": 1 + 0 * tid,
        "pid": np.full(len(rows), PID), "tid": tid,
        "thread": _named(tid, names), "culprit_pid": culprit, "culprit": _named(culprit, names),
        "culprit_tid": 0 * tid, "culprit_thread": _named(0 * tid, names),
        "step_id": (step[rows] + 1).astype(np.uint64), "start_unix_ns": begin, "start_ns": begin,
        "end_ns": begin + np.where(exact, ns, forward[rows]), "ns": ns,
    }  # fmt: skip


def _named(numbers: Numbers, names: dict[int, str]) -> pa.Array:
    known, codes = np.unique(numbers, return_inverse=True)
    texts = pa.array([names.get(int(each)) for each in known], pa.string())
    return texts.take(pa.array(codes))


def _requests(
    dice: np.random.Generator,
    places: list[_Requests],
    low: int,
    high: int,
    start: Numbers,
    end: Numbers,
    ends: dict[int, tuple[int, int, int]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those that begin in these steps, and those that end; `step`: in which."""
    begun, over = [], []
    for requests in places:
        for i in np.flatnonzero((requests.first >= low) & (requests.first < high)).tolist():
            step = int(requests.first[i])
            received = int(start[step - low] - dice.integers(200_000, 3_000_000))
            ends[int(requests.key[i])] = received, int(start[step - low]), int(end[step - low])
            begun.append((step, int(requests.key[i]), received))
        for i in np.flatnonzero((requests.end > low) & (requests.end <= high)).tolist():
            step, key = int(requests.end[i]) - 1, int(requests.key[i])
            size = int(requests.prompt[i]), int(requests.end[i] - requests.first[i])
            over.append((step, key, int(end[step - low]), *ends.pop(key), *size))
    begun.sort()
    over.sort()
    opened = {
        "step": [step for step, *_ in begun],
        **_ids([key for _, key, _ in begun]),
        "parent_span_id": [None] * len(begun), "sampled": [None] * len(begun),
        "received_ns": [received for *_, received in begun],
    }  # fmt: skip
    at = list(zip(*over, strict=True)) or [()] * 8
    closed = {
        "step": list(at[0]),
        **_ids(list(at[1])),
        **{name: [None] * len(over) for name in _ABSENT},
        "operation": ["chat"] * len(over), "model": ["synthetic"] * len(over),
        "finish_reason": ["length"] * len(over), "finished": [True] * len(over),
        "received_ns": at[3], "tokenised_ns": [ns + 50_000 for ns in at[3]],
        "queued_ns": [ns + 90_000 for ns in at[3]], "first_scheduled_ns": at[4],
        "first_token_ns": at[5], "first_sent_ns": [ns + 30_000 for ns in at[5]],
        "finished_ns": at[2], "sent_ns": [ns + 60_000 for ns in at[2]],
        "prompt_tokens": at[6], "output_tokens": at[7],
        "e2e_ns": [ns + 60_000 - begin for ns, begin in zip(at[2], at[3], strict=True)],
    }  # fmt: skip
    return opened, closed


_ABSENT = (
    "parent_span_id", "sampled", "tenant", "external_id", "max_tokens", "error",
    "ttft_unattributed_ns",
)  # fmt: skip


def _ids(keys: list[int]) -> dict[str, Any]:
    return {
        "trace_id": [f"{key:032x}" for key in keys],
        "span_id": [f"{key:016x}" for key in keys],
        "request_id": [f"made-up-{key:016x}" for key in keys],
        "request_key": keys,
        "pid": [PID] * len(keys),
        "tid": [FRONT] * len(keys),
    }


def _polls(
    low: int, high: int, end: Numbers, tables: dict[schema.Table, dict[str, Any]]
) -> dict[str, Any]:
    bounds = np.array([*range(low, high, STEPS_A_POLL), high])
    last = end[bounds[1:] - 1 - low]

    def counted(steps: Any) -> Numbers:
        return np.histogram(np.asarray(steps, np.int64), bounds)[0]

    steps = np.arange(low, high)
    facts = tables[schema.KERNEL]["step_id"].astype(np.int64) - 1
    return {
        "unix_ns": last, "mono_ns": last + 150_000, "due_ns": last + 150_000,
        "facts_complete_ns": last + 80_000, "opens": counted(tables[schema.OPENS]["step"]),
        "ranks": 0 * last, "steps": counted(steps), "kernel": counted(facts),
        "requests": counted(tables[schema.REQUESTS]["step"]),
    }  # fmt: skip
