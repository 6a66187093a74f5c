"""Writes the rows of segments into one Parquet file a table, with as much memory as a segment and
a row group take, however many segments there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dsagent.agent.fleet.free_text import masked
from dsagent.agent.sinks.schema import TABLES, Table
from dsagent.agent.sinks.segment import ROWS_PER_GROUP
from dsagent.agent.sinks.tables import Unreadable, read_table

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

GROUP_ROWS = 16 * ROWS_PER_GROUP
GROUP_BYTES = 32 << 20  # in memory, of one table
# What an agent closes: 64 MiB for all tables together and a row group of each.
MAX_FILE_BYTES = 256 << 20
MAX_UNPACKED_BYTES = 2 << 30


def read_segment(files: Mapping[str, Path]) -> dict[str, pa.Table]:
    """All of it or nothing: a request without its parts would not add up.

    Raises Unreadable, and FileNotFoundError where it has just been removed.
    """
    return {
        table.name: read_capped(files[table.name], table) for table in TABLES if table.name in files
    }


def read_capped(path: Path, table: Table) -> pa.Table:
    """Not where it is larger than any agent makes it: anybody may have put it there."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise Unreadable(f"{path}: larger than any file of an agent")
    if unpacked_bytes(path) > MAX_UNPACKED_BYTES:
        raise Unreadable(f"{path}: larger than any file of an agent, once unpacked")
    return read_table(path, table)


def unpacked_bytes(path: Path) -> int:
    """As its footer has it; 0 where there is none: who reads it will say so."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from dsagent.agent.sinks.regular import open_regular

    try:
        with open_regular(path) as file:
            footer = pq.read_metadata(file)
            return sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, pa.ArrowException):
        return 0


class BatchWriter:
    """Row groups are filled over many segments: a segment of 10 s has few rows."""

    def __init__(self, folder: Path, *, is_masked: bool) -> None:
        self._folder = folder
        self._is_masked = is_masked
        self._waiting: dict[str, list[pa.Table]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}  # rows and bytes of those
        self._writers: dict[str, pq.ParquetWriter] = {}
        self.rows: dict[str, int] = {}

    def add(self, segment: Mapping[str, pa.Table]) -> None:
        """Raises OSError where the disk does not take it."""
        for table in TABLES:
            rows = segment.get(table.name)
            if rows is None or not rows.num_rows:
                continue
            if self._is_masked:
                rows = masked(rows, table)
            self._waiting.setdefault(table.name, []).append(rows)
            self.rows[table.name] = self.rows.get(table.name, 0) + rows.num_rows
            count, size = self._sizes.get(table.name, (0, 0))
            count, size = count + rows.num_rows, size + rows.nbytes
            self._sizes[table.name] = count, size
            if count >= GROUP_ROWS or size >= GROUP_BYTES:
                self._flush(table.name)

    def close(self) -> dict[str, Path]:
        """Table → its file."""
        for name in list(self._waiting):
            self._flush(name)
        for writer in self._writers.values():
            writer.close()
        return {name: self._path(name) for name in self._writers}

    def _flush(self, name: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        waiting = self._waiting.pop(name)
        del self._sizes[name]
        group = pa.concat_tables(waiting)
        writer = self._writers.get(name)
        if writer is None:
            writer = self._writers[name] = pq.ParquetWriter(
                self._path(name), group.schema, compression="zstd", write_page_checksum=True
            )
        writer.write_table(group, row_group_size=group.num_rows)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.parquet"
