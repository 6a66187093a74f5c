"""Every text column of a recording is ours or masked, and masking changes nothing else."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest

from dsagent.agent.fleet.free_text import FREE_TEXT, masked
from dsagent.agent.sinks.schema import PARTS, REQUESTS, SAMPLES, TABLES, Table

# Ids that we make, and names out of lists of our own.
OURS = {
    "requests": {
        "trace_id", "span_id", "parent_span_id", "delayed_by.cause", "delayed_by.trace_id",
    },
    "parts": {
        "trace_id", "span_id", "whole", "cause", "how", "evidence.source", "evidence.unit",
        "culprits.kind", "culprits.trace_id",
    },
    "steps": {"admission"},
    "shares": {"phase"},
    "opens": {"trace_id", "span_id", "parent_span_id"},
    "polls": {"not_looked_at"},
    "kernel": {"kind"},
    "samples": {"name"},
    "statuses": {"kind", "state"},
}  # fmt: skip


def texts_of(table: Table) -> set[str]:
    found = set()
    for column in table.columns:
        if column.type.startswith("list<struct<"):
            fields = re.findall(r"(\w+) string", column.type)
            found |= {f"{column.name}.{field}" for field in fields}
        elif "string" in column.type:
            found.add(column.name)
    return found


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_text_is_ours_or_masked(table: Table) -> None:
    ours, free = OURS.get(table.name, set()), set(FREE_TEXT.get(table.name, ()))
    assert not ours & free
    assert ours | free == texts_of(table)


def table_of(table: Table, rows: list[dict[str, object]]) -> pa.Table:
    schema = table.arrow()
    blank: dict[str, object] = {field.name: None for field in schema}
    return pa.Table.from_pylist([blank | row for row in rows], schema=schema)


def test_nested_texts_are_masked_and_the_rest_stays() -> None:
    culprit = {"kind": "process", "ns": 5, "pid": 7, "request_id": None, "trace_id": None}
    rows: list[dict[str, object]] = [
        {"cause": "cpu.runqueue", "ns": 5, "culprits": [{**culprit, "name": "a@example.com"}]},
        {"cause": "lock.wait", "ns": 6, "culprits": None},
        {"cause": "lock.wait", "ns": 7, "culprits": []},
        {
            "cause": "io.block",
            "ns": 8,
            "culprits": [{**culprit, "name": "dd"}, {**culprit, "name": "10.1.2.3"}],
        },
    ]
    for first in range(len(rows)):  # slices share the arrays of the whole
        given = table_of(PARTS, rows).slice(first)
        out = masked(given, PARTS)
        assert out.schema == given.schema
        text = str(out.to_pylist())
        assert "a@example.com" not in text
        assert "10.1.2.3" not in text
        names = [[c["name"] for c in row["culprits"] or ()] for row in out.to_pylist()]
        assert names == [["[email]"], [], [], ["dd", "[ip]"]][first:]
        assert out["culprits"].is_null().to_pylist() == [False, True, False, False][first:]
        assert out["ns"].to_pylist() == [5, 6, 7, 8][first:]


def test_maps_keep_their_keys() -> None:
    rows: list[dict[str, object]] = [
        {"name": "x", "attributes": [("by", "bob@example.com"), ("of", "a")]},
        {"name": "y", "attributes": []},
    ]
    out = masked(table_of(SAMPLES, rows), SAMPLES).to_pylist()
    assert [row["attributes"] for row in out] == [[("by", "[email]"), ("of", "a")], []]


def test_ids_that_people_look_for_stay() -> None:
    rows: list[dict[str, object]] = [
        {
            "request_id": "chatcmpl-123e4567-e89b-12d3-a456-426614174000",
            "tenant": "acme",
            "model": "deepseek-ai/DeepSeek-V3",
            "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        }
    ]
    given = table_of(REQUESTS, rows)
    assert masked(given, REQUESTS).equals(given)
