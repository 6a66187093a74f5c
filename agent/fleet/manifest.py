"""What says that a batch in a store is whole: written after all of its files. Pure.

It comes back from a store that others may write to: what cannot be is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsagent.agent.fleet.layout import POD, place_of, raw_path
from dsagent.agent.sinks.schema import TABLES, VERSION

FORMAT = "dsagent rolled batch"
MAX_SEGMENTS = 1_000_000


class BadManifest(Exception):  # noqa: N818
    """Why it is none."""


@dataclass(frozen=True, slots=True)
class RolledFile:
    """One table of a batch."""

    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Batch:
    """`segments`: number → begin in Unix nanoseconds, of those whose rows are in the files."""

    pod: str
    hour: str
    name: str
    segments: Mapping[int, int]
    files: Mapping[str, RolledFile]
    masked: bool = True

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files.values())

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def manifest_text(batch: Batch) -> bytes:
    document = {
        "format": FORMAT,
        "schema_version": VERSION,
        "pod": batch.pod,
        "hour": batch.hour,
        "masked": batch.masked,
        "segments": [[number, ns] for number, ns in sorted(batch.segments.items())],
        "files": {
            table: {"rows": file.rows, "bytes": file.bytes, "sha256": file.sha256}
            for table, file in batch.files.items()
        },
    }
    return json.dumps(document).encode()


def parse_manifest(path: str, text: bytes) -> Batch:
    """`path`: where it lies; its own pod, hour and name are held to be those. Raises
    BadManifest."""
    place = place_of(path)
    if place is None or place.tier != "rolled":
        raise BadManifest("not where a manifest lies")
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise BadManifest("not a manifest")
        _count(document["schema_version"])  # whichever: an hour outlives an upgrade
        if (document["pod"], document["hour"]) != (place.pod, place.hour):
            raise BadManifest("says another pod or hour than its path")
        return Batch(
            pod=place.pod,
            hour=place.hour,
            name=place.name,
            segments=_segments(document["segments"]),
            files={
                table.name: _file(document["files"][table.name], table.name, place)
                for table in TABLES
                if table.name in document["files"]
            },
            masked=document["masked"] is True,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadManifest(f"holds what cannot be: {type(error).__name__}") from error


def _segments(pairs: Any) -> dict[int, int]:
    if len(pairs) > MAX_SEGMENTS:
        raise ValueError("too many")
    return {_count(number): _count(ns) for number, ns in pairs}


def _file(document: Any, table: str, place: Any) -> RolledFile:
    digest = document["sha256"]
    if not isinstance(digest, str) or len(digest) != 64:
        raise ValueError("no digest")
    path = raw_path(table, place.hour, place.pod, place.name)
    return RolledFile(path, _count(document["rows"]), _count(document["bytes"]), digest)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("no count")
    return value


def is_pod(name: str) -> bool:
    return POD.fullmatch(name) is not None
