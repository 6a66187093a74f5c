"""Gives back the complete accounts that a recording holds, of a running agent too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from dsagent.agent.account import Account, Culprit, DelayedBy, Evidence, Part
from dsagent.agent.errors import DsagentError
from dsagent.agent.sinks.recording_meta import read_meta
from dsagent.agent.sinks.schema import PARTS, REQUESTS, Table
from dsagent.agent.sinks.segment import segment_files
from dsagent.instrumentation.records import RequestRecord

_Rows = list[dict[str, Any]]
_Key = tuple[str, str]  # trace id, span id


def read_accounts(directory: str | Path, since_unix_ns: int | None = None) -> list[Account]:
    """The accounts of the requests that ended at or after `since_unix_ns`, in order of their end.

    Raises DsagentError where there is no recording, or a file of it cannot be read.
    """
    folder = Path(directory)
    read_meta(folder)
    try:
        found = segment_files(folder)
    except OSError as error:
        raise DsagentError(f"{folder}: {error.strerror}") from error
    paths = {(f.number, f.table): f.path for f in found if f.is_closed}
    accounts: list[Account] = []
    for number in sorted({number for number, table in paths if table == REQUESTS.name}):
        requests = paths[number, REQUESTS.name]
        try:
            accounts += _accounts(requests, paths.get((number, PARTS.name)), since_unix_ns)
        except FileNotFoundError:
            continue  # the running agent has just removed its oldest segment
    return sorted(accounts, key=lambda account: account.record.sent_ns)


def _accounts(requests: Path, parts: Path | None, since_unix_ns: int | None) -> Iterator[Account]:
    since = None if since_unix_ns is None else [("sent_unix_ns", ">=", since_unix_ns)]
    rows = _read(requests, REQUESTS, since)
    if not rows:
        return
    by_request: dict[_Key, dict[str, list[Part]]] = {}
    for row in _read(parts, PARTS, None) if parts is not None else ():
        key = (row["trace_id"], row["span_id"])
        wholes = by_request.setdefault(key, {"e2e": [], "ttft": []})
        wholes[row["whole"]].append(_part(row))
    for row in rows:
        wholes = by_request.get((row["trace_id"], row["span_id"]), {"e2e": [], "ttft": []})
        yield _account(row, wholes)


def _read(path: Path, table: Table, filters: list[tuple[str, str, int]] | None) -> _Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        read = pq.read_table(path, schema=table.arrow(), filters=filters, partitioning=None)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DsagentError(f"{path}: not readable: {reason}") from error
    rows: _Rows = read.to_pylist()
    return rows


def _account(row: dict[str, Any], parts: dict[str, list[Part]]) -> Account:
    names = {field.name for field in fields(RequestRecord)}
    record = {name: value for name, value in row.items() if name in names}
    record["trace_id"] = int(row["trace_id"], 16)
    record["span_id"] = int(row["span_id"], 16)
    parent = row["parent_span_id"]
    record["parent_span_id"] = None if parent is None else int(parent, 16)
    return Account(
        record=RequestRecord(**record),
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
    return Part(
        cause=row["cause"],
        ns=row["ns"],
        how=row["how"],
        evidence=tuple(Evidence(**evidence) for evidence in row["evidence"]),
        culprits=tuple(Culprit(**culprit) for culprit in row["culprits"]),
    )
