"""Questions to a fleet's store in SQL: the same for a folder and for a bucket.

Each table of a recording is a view of that name with the columns hour and pod beside its own, and
each hourly table one called hourly_NAME. Only whole batches and waves are seen. Needs [query].
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.fleet.layout import (
    HOUR_NS,
    HOURLY_TABLES,
    hour_of,
    hourly_path,
    place_of,
    raw_path,
)
from dsagent.agent.fleet.scan import database, dataset, put_up
from dsagent.agent.fleet.store import Store
from dsagent.agent.sinks.schema import TABLES

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 10_000  # of an answer
MAX_HOURS = 24 * 366

# Questions by name: docs/fleet.md shows them, and a test runs them.
NAMED: Mapping[str, str] = {
    "slowest": """
SELECT r.hour, r.pod, r.model, r.trace_id, r.e2e_ns / 1e6 AS e2e_ms, r.ttft_ns / 1e6 AS ttft_ms,
       arg_max(p.cause, p.ns) AS most_of_it, max(p.ns) / 1e6 AS of_that_ms
FROM requests r LEFT JOIN parts p
  ON (p.hour, p.pod, p.trace_id, p.span_id) = (r.hour, r.pod, r.trace_id, r.span_id)
 AND p.whole = 'e2e'
WHERE NOT r.partial
GROUP BY ALL ORDER BY r.e2e_ns / 1e6 DESC LIMIT 20""",
    "causes": """
SELECT hour, model, cause, sum(ns) / 1e9 AS seconds,
       round(100 * sum(ns) / sum(sum(ns)) OVER (PARTITION BY hour, model), 1) AS percent
FROM hourly_causes WHERE whole = 'e2e' AND NOT partial
GROUP BY hour, model, cause ORDER BY hour, model, seconds DESC""",
    "culprits": """
SELECT cause, kind, name, count(DISTINCT pod) AS pods, sum(times) AS times, sum(ns) / 1e9 AS seconds
FROM hourly_culprits
GROUP BY cause, kind, name ORDER BY seconds DESC LIMIT 20""",
    "latency": """
WITH running AS (
    SELECT model, le_ns, sum(sum(requests)) OVER (PARTITION BY model ORDER BY le_ns) AS below,
           sum(sum(requests)) OVER (PARTITION BY model) AS requests
    FROM hourly_latency WHERE quantity = 'ttft' AND NOT partial GROUP BY model, le_ns
)
SELECT model, max(requests) AS requests,
       min(le_ns) FILTER (WHERE below >= 0.5 * requests) / 1e6 AS ttft_p50_ms_at_most,
       min(le_ns) FILTER (WHERE below >= 0.99 * requests) / 1e6 AS ttft_p99_ms_at_most
FROM running GROUP BY model ORDER BY model""",
}


@dataclass(frozen=True, slots=True)
class Answer:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    is_cut: bool  # there are more than MAX_ROWS

    def json(self) -> dict[str, Any]:
        rows = [[_plain(value) for value in row] for row in self.rows]
        return {"columns": list(self.columns), "rows": rows, "is_cut": self.is_cut}


def _plain(value: Any) -> Any:
    """As JSON has it: dates, decimals and the like as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value)


def ask(
    store: Store, question: str, last_ns: int | None = None, now_ns: int | None = None
) -> Answer:
    """`question`: a name out of NAMED, or SQL. `last_ns`: only the hours of that long until now.
    Raises DsagentError: not SQL, or no such table (exit 2)."""
    hours = None
    if last_ns is not None:
        now_ns = time.time_ns() if now_ns is None else now_ns
        count = min(MAX_HOURS, last_ns // HOUR_NS + 1)
        hours = [hour_of(now_ns - i * HOUR_NS) for i in range(count)]
    text = NAMED.get(question, question)
    # Only what is asked for is listed and opened.
    wanted = set(re.findall(r"\w+", text.lower()))
    with database() as sql:
        import duckdb
        import pyarrow as pa

        put_up(sql, {name: dataset(store, p, s) for name, p, s in _views(store, wanted, hours)})
        try:
            sql.execute("SET enable_external_access = false")
            sql.execute("SET lock_configuration = true")
            sql.execute(text)
            rows = sql.fetchmany(MAX_ROWS + 1)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise DsagentError(f"cannot answer that: {reason}", exit_code=USAGE) from error
        columns = tuple(column[0] for column in sql.description or ())
    return Answer(columns, rows[:MAX_ROWS], len(rows) > MAX_ROWS)


def _views(
    store: Store, wanted: set[str], hours: list[str] | None
) -> Iterator[tuple[str, list[str], pa.Schema]]:
    """Name, files and columns of each."""
    raw = [table for table in TABLES if table.name in wanted]
    if raw:
        batches = list(_committed(store, "rolled", hours))
        for table in raw:
            there = set(_raw_files(store, table.name, hours))
            paths = [raw_path(table.name, p.hour, p.pod, p.name) for p in batches]
            yield table.name, [path for path in paths if path in there], table.arrow()
    hourly = [name for name in HOURLY_TABLES if f"hourly_{name}" in wanted]
    if hourly:
        waves = list(_committed(store, "aggregated", hours))
        for name in hourly:
            paths = [hourly_path(name, wave.hour, wave.name) for wave in waves]
            yield f"hourly_{name}", paths, _hourly_schema(name)


def _committed(store: Store, tier: str, hours: list[str] | None) -> Iterator[Any]:
    for folder in [tier] if hours is None else [f"{tier}/hour={hour}" for hour in hours]:
        for found in store.list(folder):
            place = place_of(found.path)
            if place is not None and not found.path.endswith(".part"):
                yield place


def _raw_files(store: Store, table: str, hours: list[str] | None) -> Iterator[str]:
    base = f"raw/{table}"
    for folder in [base] if hours is None else [f"{base}/hour={hour}" for hour in hours]:
        for found in store.list(folder):
            yield found.path


def _hourly_schema(name: str) -> pa.Schema:
    """Of what hourly.py writes, but for the hour."""
    import pyarrow as pa

    text, count = pa.string(), pa.int64()
    who = [("pod", text), ("model", text), ("tenant", text)]
    columns: dict[str, list[tuple[str, pa.DataType]]] = {
        "requests": [
            *who,
            *(("operation", text), ("partial", pa.bool_()), ("outcome", text)),
            *(
                (column, count)
                for column in (
                    *("requests", "e2e_ns", "unattributed_ns", "ttft_requests", "ttft_ns"),
                    *("ttft_unattributed_ns", "prompt_tokens", "output_tokens", "cached_tokens"),
                )
            ),
        ],
        "causes": [
            *who,
            *(("partial", pa.bool_()), ("whole", text), ("cause", text), ("how", text)),
            *(("parts", count), ("ns", count)),
        ],
        "latency": [
            *who,
            *(("partial", pa.bool_()), ("quantity", text), ("le_ns", count), ("requests", count)),
        ],
        "culprits": [
            *(("pod", text), ("model", text), ("cause", text), ("kind", text), ("name", text)),
            *(("times", count), ("ns", count)),
        ],
    }
    return pa.schema(columns[name])
