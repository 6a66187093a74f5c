"""Where things lie in a fleet's store: one place for who writes, reads and deletes there. Pure.

    raw/TABLE/hour=2026-11-29T21/pod=POD/BATCH.parquet   what agents recorded
    rolled/hour=2026-11-29T21/pod=POD/BATCH.json         written last: that batch is whole
    hourly/TABLE/hour=2026-11-29T21/WAVE.parquet         added up: the batches of one wave
    aggregated/hour=2026-11-29T21/WAVE.json              written last: that wave is whole

Hours are UTC. A batch is the segments of one recording that began in that hour and came in
together: its name is the first one's begin in Unix nanoseconds, then the first and the last
segment's number. Nothing whose name does not match is ever read, overwritten or deleted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from dsagent.agent.sinks.schema import TABLES

HOUR_NS = 3_600_000_000_000
HOURLY_TABLES = ("requests", "causes", "latency", "culprits")

Tier = Literal["raw", "rolled", "hourly", "aggregated"]

_TABLE = "|".join(table.name for table in TABLES)
_HOUR = r"hour=(?P<hour>\d{4}-\d\d-\d\dT\d\d)"
_POD = r"pod=(?P<pod>[A-Za-z0-9][A-Za-z0-9._-]{0,252})"
_BATCH = r"(?P<batch>\d{1,19}-\d{8}-\d{8})"
_WAVE = r"(?P<wave>[0-9a-f]{16})"
_PATHS: dict[Tier, re.Pattern[str]] = {
    "raw": re.compile(rf"raw/(?P<table>{_TABLE})/{_HOUR}/{_POD}/{_BATCH}\.parquet"),
    "rolled": re.compile(rf"rolled/{_HOUR}/{_POD}/{_BATCH}\.json"),
    "hourly": re.compile(rf"hourly/(?P<table>{'|'.join(HOURLY_TABLES)})/{_HOUR}/{_WAVE}\.parquet"),
    "aggregated": re.compile(rf"aggregated/{_HOUR}/{_WAVE}\.json"),
}
POD = re.compile(_POD.removeprefix("pod="))
UNFINISHED = ".part"  # of a file not yet whole, where a store has no better way


@dataclass(frozen=True, slots=True)
class Place:
    """One file of the layout; `name` is its batch or wave."""

    path: str
    tier: Tier
    hour: str
    name: str
    pod: str = ""
    table: str = ""


def place_of(path: str) -> Place | None:
    """None: not of this layout, so not ours. A file left unfinished counts as the file."""
    for tier, pattern in _PATHS.items():
        found = pattern.fullmatch(path.removesuffix(UNFINISHED))
        if found is not None:
            of = found.groupdict()
            try:
                hour_end_ns(of["hour"])
            except ValueError:  # a 14th month
                return None
            name = of.get("batch") or of["wave"]
            return Place(path, tier, of["hour"], name, of.get("pod") or "", of.get("table") or "")
    return None


def hour_of(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H")


def hour_end_ns(hour: str) -> int:
    """Raises ValueError: no such hour."""
    begin = datetime.strptime(hour, "%Y-%m-%dT%H").replace(tzinfo=UTC)
    return int(begin.timestamp()) * 1_000_000_000 + HOUR_NS


def raw_path(table: str, hour: str, pod: str, batch: str) -> str:
    return f"raw/{table}/hour={hour}/pod={pod}/{batch}.parquet"


def rolled_folder(hour: str, pod: str) -> str:
    return f"rolled/hour={hour}/pod={pod}"


def hourly_path(table: str, hour: str, wave: str) -> str:
    return f"hourly/{table}/hour={hour}/{wave}.parquet"


def aggregated_path(hour: str, wave: str) -> str:
    return f"aggregated/hour={hour}/{wave}.json"
