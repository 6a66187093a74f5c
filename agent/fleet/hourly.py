"""Adds up raw batches by hour: what is left of them when they are deleted.

Sums are exact: integers throughout, and a wave counts only once the files that were written give
the same totals as the batches they were made of. A latency histogram has a row for each bucket in
use, four to a doubling, so adding two up is adding rows up.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.fleet.layout import aggregated_path, hourly_path, place_of
from dsagent.agent.fleet.manifest import BadManifest, Batch
from dsagent.agent.fleet.scan import database, dataset, put_up
from dsagent.agent.fleet.store import Store
from dsagent.agent.sinks.schema import PARTS, REQUESTS

if TYPE_CHECKING:
    import duckdb

FORMAT = "dsagent hourly wave"
MAX_BATCHES = 500  # of one wave: what is scanned at a time
CULPRITS_KEPT = 64  # by pod, model and cause; the rest is one row, ~other

_WHO = """
who AS (
    SELECT pod, trace_id, span_id, any_value(model) AS model, any_value(tenant) AS tenant,
           bool_or(partial) AS partial
    FROM requests GROUP BY pod, trace_id, span_id
)"""
_BLAMED = f"""
WITH {_WHO},
blamed AS (
    SELECT parts.hour, parts.pod, model, cause, unnest(culprits) AS culprit
    FROM parts LEFT JOIN who USING (pod, trace_id, span_id) WHERE whole = 'e2e'
),
named AS (
    SELECT hour, pod, model, cause, culprit.kind AS kind,
           CASE culprit.kind WHEN 'request' THEN '~request' ELSE culprit.name END AS name,
           count(*) AS times, sum(culprit.ns) AS ns
    FROM blamed GROUP BY ALL
),
ranked AS (
    SELECT *, row_number() OVER (
        PARTITION BY hour, pod, model, cause ORDER BY ns DESC, kind, name) AS place
    FROM named
)"""
# Each query's columns are those of the table it makes; docs/fleet.md describes them.
TABLES: Mapping[str, str] = {
    "requests": """
SELECT hour, pod, model, tenant, operation, partial,
       coalesce(error, finish_reason, 'unknown') AS outcome,
       count(*) AS requests,
       CAST(sum(e2e_ns) AS BIGINT) AS e2e_ns,
       CAST(sum(unattributed_ns) AS BIGINT) AS unattributed_ns,
       count(ttft_ns) AS ttft_requests,
       CAST(coalesce(sum(ttft_ns), 0) AS BIGINT) AS ttft_ns,
       CAST(coalesce(sum(ttft_unattributed_ns), 0) AS BIGINT) AS ttft_unattributed_ns,
       CAST(coalesce(sum(prompt_tokens), 0) AS BIGINT) AS prompt_tokens,
       CAST(sum(output_tokens) AS BIGINT) AS output_tokens,
       CAST(coalesce(sum(cached_tokens), 0) AS BIGINT) AS cached_tokens
FROM requests GROUP BY ALL ORDER BY ALL""",
    "causes": f"""
WITH {_WHO}
SELECT parts.hour, parts.pod, model, tenant, partial, whole, cause, how,
       count(*) AS parts, CAST(sum(ns) AS BIGINT) AS ns
FROM parts LEFT JOIN who USING (pod, trace_id, span_id) GROUP BY ALL ORDER BY ALL""",
    "latency": """
WITH measured AS (
    SELECT hour, pod, model, tenant, partial, 'e2e' AS quantity, e2e_ns AS ns FROM requests
    UNION ALL
    SELECT hour, pod, model, tenant, partial, 'ttft', ttft_ns FROM requests
    UNION ALL
    SELECT hour, pod, model, tenant, partial, 'tpot', CAST(tpot_ns AS BIGINT) FROM requests
)
SELECT hour, pod, model, tenant, partial, quantity,
       CASE WHEN ns <= 1 THEN 1 ELSE CAST(ceil(pow(2, ceil(log2(ns) * 4) / 4)) AS BIGINT) END
           AS le_ns,
       count(*) AS requests
FROM measured WHERE ns IS NOT NULL GROUP BY ALL ORDER BY ALL""",
    "culprits": f"""
{_BLAMED}
SELECT hour, pod, model, cause,
       CASE WHEN place <= {CULPRITS_KEPT} THEN kind ELSE '~other' END AS kind,
       CASE WHEN place <= {CULPRITS_KEPT} THEN name ELSE '~other' END AS name,
       CAST(sum(times) AS BIGINT) AS times, CAST(sum(ns) AS BIGINT) AS ns
FROM ranked GROUP BY ALL ORDER BY ALL""",
}
# The same totals, of the batches and of what has been written.
_RAW_SUMS = """
SELECT (SELECT count(*) FROM requests), (SELECT coalesce(sum(e2e_ns), 0) FROM requests),
       (SELECT coalesce(sum(unattributed_ns), 0) FROM requests),
       (SELECT coalesce(sum(ns), 0) FROM parts WHERE whole = 'e2e'),
       (SELECT coalesce(sum(ns), 0) FROM parts WHERE whole = 'ttft'),
       (SELECT count(*) FROM requests),
       (SELECT coalesce(sum(c.ns), 0)
        FROM (SELECT unnest(culprits) AS c FROM parts WHERE whole = 'e2e'))"""
_WRITTEN_SUMS = """
SELECT (SELECT coalesce(sum(requests), 0) FROM w_requests),
       (SELECT coalesce(sum(e2e_ns), 0) FROM w_requests),
       (SELECT coalesce(sum(unattributed_ns), 0) FROM w_requests),
       (SELECT coalesce(sum(ns), 0) FROM w_causes WHERE whole = 'e2e'),
       (SELECT coalesce(sum(ns), 0) FROM w_causes WHERE whole = 'ttft'),
       (SELECT coalesce(sum(requests), 0) FROM w_latency WHERE quantity = 'e2e'),
       (SELECT coalesce(sum(ns), 0) FROM w_culprits)"""
_SUMS = (
    "requests", "e2e_ns", "unattributed_ns", "parts_ns", "ttft_parts_ns", "in_histogram",
    "culprits_ns",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wave:
    """Batches of one hour that were added up together. `files`: table → digest."""

    hour: str
    name: str
    batches: frozenset[tuple[str, str]]  # pod, name
    files: Mapping[str, str]
    sums: Mapping[str, int]

    def is_there(self, store: Store) -> bool:
        """Whether the store still holds what was written, byte for byte."""
        for table, sha256 in self.files.items():
            digest = store.digest(hourly_path(table, self.hour, self.name))
            if digest is None or digest.sha256 != sha256:
                return False
        return True


def add_up(store: Store, hour: str, batches: Sequence[Batch]) -> Wave:
    """At most MAX_BATCHES of one hour, into one wave. Raises DsagentError: the store refuses, a
    batch cannot be read, or what was written does not add up to what was read."""
    import duckdb
    import pyarrow as pa

    members = sorted((batch.pod, batch.name) for batch in batches)
    name = hashlib.sha256(json.dumps(members).encode()).hexdigest()[:16]
    try:
        with tempfile.TemporaryDirectory(prefix="dsagent-hourly-") as folder, database() as sql:
            raw = {
                table.name: dataset(
                    store,
                    [b.files[table.name].path for b in batches if table.name in b.files],
                    table.arrow(),
                )
                for table in (REQUESTS, PARTS)
            }
            put_up(sql, raw)
            paths = {table: Path(folder) / f"{table}.parquet" for table in TABLES}
            for table, query in TABLES.items():
                _write(sql, query, paths[table])
            sums = _agreeing_sums(sql, paths)
            files = {
                table: store.put(path, hourly_path(table, hour, name)).sha256
                for table, path in paths.items()
            }
            wave = Wave(hour, name, frozenset(members), files, sums)
            manifest = Path(folder) / "wave.json"
            manifest.write_bytes(_text(wave))
            store.put(manifest, aggregated_path(hour, name))
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DsagentError(f"cannot add up {hour}: {reason}") from error
    return wave


def _write(sql: duckdb.DuckDBPyConnection, query: str, path: Path) -> None:
    """The hour is in the folder's name; in the file it would be there twice."""
    target = str(path).replace("'", "''")
    sql.execute(
        f"COPY (SELECT * EXCLUDE (hour) FROM ({query})) TO '{target}' "
        "(FORMAT parquet, COMPRESSION zstd)"
    )


def _agreeing_sums(sql: duckdb.DuckDBPyConnection, paths: Mapping[str, Path]) -> dict[str, int]:
    for table, path in paths.items():
        target = str(path).replace("'", "''")
        sql.execute(f"CREATE VIEW w_{table} AS SELECT * FROM read_parquet('{target}')")
    raw, written = sql.execute(_RAW_SUMS).fetchone(), sql.execute(_WRITTEN_SUMS).fetchone()
    assert raw is not None
    assert written is not None
    for what, before, after in zip(_SUMS, raw, written, strict=True):
        if before != after:
            raise DsagentError(f"{what} does not add up: {before} in the batches, {after} by hour")
    return {what: int(value) for what, value in zip(_SUMS, raw, strict=True)}


def _text(wave: Wave) -> bytes:
    return json.dumps(
        {
            "format": FORMAT,
            "hour": wave.hour,
            "batches": sorted(wave.batches),
            "files": dict(wave.files),
            "sums": dict(wave.sums),
        }
    ).encode()


def parse_wave(path: str, text: bytes) -> Wave:
    """Raises BadManifest."""
    place = place_of(path)
    if place is None or place.tier != "aggregated":
        raise BadManifest("not where a wave lies")
    try:
        document: Any = json.loads(text)
        if document["format"] != FORMAT or document["hour"] != place.hour:
            raise BadManifest("not a wave of that hour")
        return Wave(
            place.hour,
            place.name,
            frozenset((str(pod), str(name)) for pod, name in document["batches"]),
            {table: str(document["files"][table]) for table in TABLES},
            {what: int(document["sums"][what]) for what in _SUMS},
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadManifest(f"holds what cannot be: {type(error).__name__}") from error
