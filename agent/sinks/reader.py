"""Gives back the complete accounts that a recording holds, of a running agent too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from dsagent.agent import streams
from dsagent.agent.account import (
    Account,
    Culprit,
    CulpritKind,
    DelayedBy,
    Evidence,
    How,
    Part,
)
from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.procfs import escape
from dsagent.agent.sinks.recording_meta import read_meta
from dsagent.agent.sinks.regular import open_regular
from dsagent.agent.sinks.schema import PARTS, REQUESTS, Table
from dsagent.agent.sinks.segment import segment_files
from dsagent.instrumentation.records import RequestRecord

_Rows = list[dict[str, Any]]
_Key = tuple[str, str]  # trace id, span id
FILES_TOLD = 5


class _Unreadable(Exception):  # noqa: N818
    """A file, and why it cannot be used."""


def tell(line: str) -> None:
    streams.tell(f"dsagent: {escape(line, limit=500)}\n")


def read_accounts(
    directory: str | Path, since_unix_ns: int | None = None, *, tell: Callable[[str], None] = tell
) -> list[Account]:
    """The accounts of the requests that ended at or after `since_unix_ns`, in order of their end.

    A segment with a file that cannot be read is left out and told in a line: which and why.
    Raises DsagentError (exit 2) where there is no recording, or nothing of it can be read.
    """
    folder = Path(directory)
    read_meta(folder)
    try:
        found = segment_files(folder)
    except OSError as error:
        raise DsagentError(f"{folder}: {error.strerror}", exit_code=USAGE) from error
    paths = {(f.number, f.table): f.path for f in found if f.is_closed}
    accounts: list[Account] = []
    left_out: list[str] = []
    numbers = sorted({number for number, table in paths if table == REQUESTS.name})
    for number in numbers:
        requests = paths[number, REQUESTS.name]
        try:
            accounts += _accounts(requests, paths.get((number, PARTS.name)), since_unix_ns)
        except FileNotFoundError:
            continue  # the running agent has just removed its oldest segment
        except _Unreadable as why:
            left_out.append(str(why))
    if left_out and len(left_out) == len(numbers):
        raise DsagentError(f"nothing of it can be read: {left_out[0]}", exit_code=USAGE)
    for line in left_out[:FILES_TOLD]:
        tell(f"left out: {line}")
    if len(left_out) > FILES_TOLD:
        tell(f"{len(left_out)} of {len(numbers)} segments are left out")
    return sorted(accounts, key=lambda account: account.record.sent_ns)


def _accounts(requests: Path, parts: Path | None, since_unix_ns: int | None) -> list[Account]:
    since = None if since_unix_ns is None else [("sent_unix_ns", ">=", since_unix_ns)]
    rows = _read(requests, REQUESTS, since)
    if not rows:
        return []
    by_request: dict[_Key, dict[str, list[Part]]] = {}
    with _making_sense_of(parts or requests):
        for row in _read(parts, PARTS, None) if parts is not None else ():
            key = (row["trace_id"], row["span_id"])
            wholes = by_request.setdefault(key, {"e2e": [], "ttft": []})
            wholes[row["whole"]].append(_part(row))
    with _making_sense_of(requests):
        return [
            _account(
                row, by_request.get((row["trace_id"], row["span_id"]), {"e2e": [], "ttft": []})
            )
            for row in rows
        ]


@contextmanager
def _making_sense_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise _Unreadable(f"{path}: holds what cannot be: {type(error).__name__}") from error


def _read(path: Path, table: Table, filters: list[tuple[str, str, int]] | None) -> _Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = table.arrow()
    try:
        with open_regular(path) as file:
            found = pq.read_schema(file)
            if missing := [name for name in schema.names if name not in found.names]:
                raise _Unreadable(f"{path}: not of this recording: it has no {missing[0]}")
            file.seek(0)
            read = pq.read_table(
                file,
                schema=schema,
                filters=filters,
                partitioning=None,
                page_checksum_verification=True,
            )
        read.validate(full=True)
        for column in table.columns:
            if not column.optional and read[column.name].null_count:
                raise _Unreadable(f"{path}: {column.name} is missing in a row")
        rows: _Rows = read.to_pylist()
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200]
        raise _Unreadable(f"{path}: not readable: {reason}") from error
    return rows


def _must(holds: bool) -> None:
    if not holds:
        raise ValueError("no agent writes that")


def _account(row: dict[str, Any], parts: dict[str, list[Part]]) -> Account:
    names = {field.name for field in fields(RequestRecord)}
    record = {name: value for name, value in row.items() if name in names}
    record["trace_id"] = int(row["trace_id"], 16)
    record["span_id"] = int(row["span_id"], 16)
    parent = row["parent_span_id"]
    record["parent_span_id"] = None if parent is None else int(parent, 16)
    made = RequestRecord(**record)
    _must(row["e2e_ns"] == made.e2e_ns > 0)
    _must(None not in row["step_ids"])
    _must(all(None not in (blamed["cause"], blamed["ns"]) for blamed in row["delayed_by"]))
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
    _must(row["how"] in get_args(How))
    for evidence in row["evidence"]:
        _must(None not in evidence.values())
    for culprit in row["culprits"]:
        _must(culprit["kind"] in get_args(CulpritKind))
        _must(None not in (culprit["name"], culprit["ns"]))
    return Part(
        cause=row["cause"],
        ns=row["ns"],
        how=row["how"],
        evidence=tuple(Evidence(**evidence) for evidence in row["evidence"]),
        culprits=tuple(Culprit(**culprit) for culprit in row["culprits"]),
    )
