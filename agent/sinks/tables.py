"""Reads the tables of a recording, which anybody may have written to since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsagent.agent import streams
from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.host.procfs import escape
from dsagent.agent.sinks.regular import open_regular
from dsagent.agent.sinks.schema import Table
from dsagent.agent.sinks.segment import segment_files

if TYPE_CHECKING:
    import pyarrow as pa

FILES_TOLD = 5


class Unreadable(Exception):  # noqa: N818
    """A file, and why it cannot be used."""


def tell(line: str) -> None:
    streams.tell(f"dsagent: {escape(line, limit=500)}\n")


def tell_left_out(left_out: Sequence[str], segments: int, tell: Callable[[str], None]) -> None:
    """`left_out`: which and why. Raises DsagentError (exit 2) where that is all there is."""
    if left_out and len(left_out) == segments:
        raise DsagentError(f"nothing of it can be read: {left_out[0]}", exit_code=USAGE)
    for line in left_out[:FILES_TOLD]:
        tell(f"left out: {line}")
    if len(left_out) > FILES_TOLD:
        tell(f"{len(left_out)} of {segments} segments are left out")


def closed_segments(folder: Path) -> dict[int, dict[str, Path]]:
    """Number → table → file, of the files that are closed. Raises DsagentError (exit 2)."""
    try:
        found = segment_files(folder)
    except OSError as error:
        raise DsagentError(f"{folder}: {error.strerror}", exit_code=USAGE) from error
    segments: dict[int, dict[str, Path]] = {}
    for file in found:
        if file.is_closed:
            segments.setdefault(file.number, {})[file.table] = file.path
    return segments


@contextmanager
def making_sense_of(path: Path) -> Iterator[None]:
    """What is wrong with the values of a file makes it unreadable."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise Unreadable(f"{path}: holds what cannot be: {type(error).__name__}") from error


def must(holds: object) -> None:
    if not holds:
        raise ValueError("no agent writes that")


def read_table(
    path: Path, table: Table, filters: list[tuple[str, str, int]] | None = None
) -> pa.Table:
    """All columns of the table, of their types, null only where it may be. Raises Unreadable, and
    FileNotFoundError where it is gone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = table.arrow()
    try:
        with open_regular(path) as file:
            found = pq.read_schema(file)
            if missing := [name for name in schema.names if name not in found.names]:
                raise Unreadable(f"{path}: not of this recording: it has no {missing[0]}")
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
                raise Unreadable(f"{path}: {column.name} is missing in a row")
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Unreadable(f"{path}: not readable: {reason}") from error
    return read
