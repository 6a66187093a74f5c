"""Gives back the complete accounts that a recording holds, of a running agent too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from dsagent.agent.attribution.account import (
    Account,
    Culprit,
    CulpritKind,
    DelayedBy,
    Evidence,
    How,
    Part,
)
from dsagent.agent.sinks.recording_meta import read_meta
from dsagent.agent.sinks.schema import PARTS, REQUESTS, Table
from dsagent.agent.sinks.tables import (
    Unreadable,
    closed_segments,
    making_sense_of,
    must,
    read_table,
    tell,
    tell_left_out,
)
from dsagent.instrumentation.records import RequestRecord

_Rows = list[dict[str, Any]]
_Key = tuple[str, str]  # trace id, span id


def read_accounts(
    directory: str | Path, since_unix_ns: int | None = None, *, tell: Callable[[str], None] = tell
) -> list[Account]:
    """The accounts of the requests that ended at or after `since_unix_ns`, in order of their end.

    A segment with a file that cannot be read is left out and told in a line: which and why.
    Raises DsagentError (exit 2) where there is no recording, or nothing of it can be read.
    """
    folder = Path(directory)
    read_meta(folder)
    segments = {
        number: files
        for number, files in sorted(closed_segments(folder).items())
        if REQUESTS.name in files
    }
    accounts: list[Account] = []
    left_out: list[str] = []
    for files in segments.values():
        try:
            accounts += _accounts(files[REQUESTS.name], files.get(PARTS.name), since_unix_ns)
        except FileNotFoundError:
            continue  # the running agent has just removed its oldest segment
        except Unreadable as why:
            left_out.append(str(why))
    tell_left_out(left_out, len(segments), tell)
    return sorted(accounts, key=lambda account: account.record.sent_ns)


def _accounts(requests: Path, parts: Path | None, since_unix_ns: int | None) -> list[Account]:
    since = None if since_unix_ns is None else [("sent_unix_ns", ">=", since_unix_ns)]
    rows = _read(requests, REQUESTS, since)
    if not rows:
        return []
    by_request: dict[_Key, dict[str, list[Part]]] = {}
    with making_sense_of(parts or requests):
        for row in _read(parts, PARTS, None) if parts is not None else ():
            key = (row["trace_id"], row["span_id"])
            wholes = by_request.setdefault(key, {"e2e": [], "ttft": []})
            wholes[row["whole"]].append(_part(row))
    with making_sense_of(requests):
        return [
            _account(
                row, by_request.get((row["trace_id"], row["span_id"]), {"e2e": [], "ttft": []})
            )
            for row in rows
        ]


def _read(path: Path, table: Table, filters: list[tuple[str, str, int]] | None) -> _Rows:
    rows: _Rows = read_table(path, table, filters).to_pylist()
    return rows


def request_record(row: Mapping[str, Any]) -> RequestRecord:
    """Of a row of requests. Raises ValueError and the like where it cannot be one."""
    record = {field.name: row[field.name] for field in fields(RequestRecord) if field.name in row}
    record["trace_id"] = int(row["trace_id"], 16)
    record["span_id"] = int(row["span_id"], 16)
    parent = row["parent_span_id"]
    record["parent_span_id"] = None if parent is None else int(parent, 16)
    made = RequestRecord(**record)
    must(made.e2e_ns > 0)
    return made


def _account(row: dict[str, Any], parts: dict[str, list[Part]]) -> Account:
    made = request_record(row)
    must(row["e2e_ns"] == made.e2e_ns)
    must(None not in row["step_ids"])
    must(all(None not in (blamed["cause"], blamed["ns"]) for blamed in row["delayed_by"]))
    return Account(
        record=made,
        partial=row["partial"],
        finished=row["finished"],
        e2e_ns=row["e2e_ns"],
        parts=tuple(parts["e2e"]),
        unattributed_ns=row["unattributed_ns"],
        ttft_parts=tuple(parts["ttft"]),
        ttft_unattributed_ns=row["ttft_unattributed_ns"],
        delayed_by=tuple(DelayedBy(**blamed) for blamed in row["delayed_by"]),
        step_ids=tuple(row["step_ids"]),
        engine_id=row["engine_id"],
    )


def _part(row: dict[str, Any]) -> Part:
    must(row["how"] in get_args(How))
    for evidence in row["evidence"]:
        must(None not in evidence.values())
    for culprit in row["culprits"]:
        must(culprit["kind"] in get_args(CulpritKind))
        must(None not in (culprit["name"], culprit["ns"]))
    return Part(
        cause=row["cause"],
        ns=row["ns"],
        how=row["how"],
        evidence=tuple(Evidence(**evidence) for evidence in row["evidence"]),
        culprits=tuple(Culprit(**culprit) for culprit in row["culprits"]),
    )
