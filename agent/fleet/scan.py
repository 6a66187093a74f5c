"""Parquet files of a store as tables that DuckDB reads: in a folder and in a bucket alike, since
pyarrow does the reading. Needs the extra [query]."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dsagent.agent.errors import DsagentError
from dsagent.agent.fleet.store import Store

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa
    import pyarrow.dataset as pads

MEMORY = "1GB"  # beyond it DuckDB goes to disk
# What the folders of a path say: strings, whatever they look like.
PARTITIONS = ("hour", "pod")


@contextmanager
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """An empty one in memory."""
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise DsagentError("this needs DuckDB: pip install 'dsagent[query]'") from error
    with tempfile.TemporaryDirectory(prefix="dsagent-sql-") as folder:
        connection = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": MEMORY,
                "temp_directory": folder,
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
            },
        )
        try:
            yield connection
        finally:
            connection.close()


def dataset(store: Store, paths: Iterable[str], schema: pa.Schema) -> pads.Dataset:
    """The rows of these files, with the columns that their folders say beside `schema`'s."""
    import pyarrow as pa
    import pyarrow.dataset as pads

    files, root = store.arrow()
    partitions = pa.schema([(name, pa.string()) for name in PARTITIONS if name not in schema.names])
    whole = pa.schema([*schema, *partitions])
    places = [f"{root}/{path}" for path in paths]
    if not places:
        return pads.dataset(whole.empty_table())
    return pads.dataset(
        places,
        schema=whole,
        filesystem=files,
        format="parquet",
        partitioning=pads.partitioning(partitions, flavor="hive"),
        partition_base_dir=root,
    )


def put_up(connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pads.Dataset]) -> None:
    for name, table in tables.items():
        connection.register(name, table)
