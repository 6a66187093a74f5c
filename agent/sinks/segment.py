"""One segment of a recording: a file a table, written as row groups, closed by rename."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsagent.agent.sinks.rows import Row
from dsagent.agent.sinks.schema import PART_SUFFIX, TABLES, Table

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS_PER_GROUP = 8192  # buffered in memory before they are written
_NAME = re.compile(rf"({'|'.join(table.name for table in TABLES)})-(\d{{8}})\.parquet(\.part)?")


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A file of a recording, by its name."""

    path: Path
    table: str
    number: int
    is_closed: bool


def segment_files(directory: Path) -> list[SegmentFile]:
    """Every file of a recording; others in the folder are left alone."""
    files = []
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            files.append(SegmentFile(path, match[1], int(match[2]), match[3] is None))
    return files


@dataclass(slots=True)
class _Open:
    """A table's file being written."""

    table: Table
    schema: pa.Schema
    path: Path  # once closed
    rows: list[Row] = field(default_factory=list)
    writer: pq.ParquetWriter | None = None
    file: pa.NativeFile | None = None
    rows_written: int = 0

    @property
    def part(self) -> Path:
        """Its name until then."""
        return self.path.with_name(self.path.name + PART_SUFFIX)


class Segment:
    """Rows are buffered up to a row group, so memory is bounded by tables, not by time."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self.reason = ""  # of rows that could not be expressed in the schema
        self._tables = {
            table.name: _Open(
                table, table.arrow(), directory / f"{table.name}-{number:08d}.parquet"
            )
            for table in TABLES
        }

    @property
    def bytes(self) -> int:
        """Written so far, footers not included."""
        return sum(t.file.tell() for t in self._tables.values() if t.file is not None)

    def add(self, table: Table, rows: Iterable[Row]) -> int:
        """Takes rows; gives their number. Raises OSError where the disk does not take them."""
        target = self._tables[table.name]
        before = len(target.rows)
        target.rows.extend(rows)
        added = len(target.rows) - before
        if len(target.rows) >= ROWS_PER_GROUP:
            self._flush(target)
        return added

    def add_columns(self, table: Table, columns: Sequence[Any]) -> int:
        """Takes a whole group of rows at once, column by column."""
        self._write(self._tables[table.name], columns)
        return len(columns[0])

    def close(self) -> int:
        """Makes the files what they are called; gives the number of rows in them."""
        for target in self._tables.values():
            self._flush(target)
        rows = 0
        for target in self._tables.values():  # renamed in the order of TABLES
            if target.writer is None or target.file is None:
                continue
            target.writer.close()
            target.file.close()
            _sync(target.part)
            os.rename(target.part, target.path)
            target.writer = target.file = None
            rows += target.rows_written
        return rows

    def discard(self) -> None:
        """Removes what is not closed, after an error."""
        for target in self._tables.values():
            for opened in (target.writer, target.file):
                # The disk that refused a row group may refuse a footer too; that was counted.
                with suppress(OSError):
                    if opened is not None:
                        opened.close()
            target.writer = target.file = None
            target.part.unlink(missing_ok=True)

    def _flush(self, target: _Open) -> None:
        rows, target.rows = target.rows, []
        if rows:
            self._write(target, list(zip(*rows, strict=True)))

    def _write(self, target: _Open, columns: Sequence[Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            arrays = [
                pa.array(column, kind)
                for column, kind in zip(columns, target.schema.types, strict=True)
            ]
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            # Values that another process made up: lose this group, not the recording.
            self.reason = f"{target.table.name}: {error}"
            return
        if target.writer is None:
            target.file = pa.OSFile(str(target.part), "wb")
            target.writer = pq.ParquetWriter(
                target.file, target.schema, compression="zstd", write_page_checksum=True
            )
        target.writer.write_table(pa.Table.from_arrays(arrays, schema=target.schema))
        target.rows_written += len(columns[0])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
