"""Rolls a recording into a store's partitions by hour: once each, whole, and verified.

A batch counts as rolled when its manifest is there, and that is written last. Rolling again finds
the manifests and does the rest; what an interrupted run left without a manifest is removed first.
The source is only deleted where that was asked for, no agent is recording there, and everything
that its batches say has just been read back from the store.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.fleet.batch import BatchWriter, read_capped, read_segment
from dsagent.agent.fleet.layout import (
    HOUR_NS,
    hour_end_ns,
    hour_of,
    place_of,
    raw_path,
    rolled_folder,
)
from dsagent.agent.fleet.manifest import (
    BadManifest,
    Batch,
    RolledFile,
    manifest_text,
    parse_manifest,
)
from dsagent.agent.fleet.store import Store
from dsagent.agent.sinks.recording_meta import read_meta
from dsagent.agent.sinks.schema import POLLS, TABLES
from dsagent.agent.sinks.tables import Unreadable, closed_segments

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTLED_NS = 60_000_000_000  # after its end an hour's last segment has been closed
EARLIEST_NS = 946_684_800_000_000_000  # 2000-01-01: an earlier clock was never set
CLOCK_AHEAD_NS = 24 * HOUR_NS


@dataclass(slots=True)
class Rolled:
    """What one run did. Rows and bytes are those of the batches of this run."""

    store: str
    pod: str
    batches: list[Batch] = field(default_factory=list)
    segments_before: int = 0  # rolled by an earlier run
    segments_waiting: int = 0  # of an hour that is not over
    segments_gone: int = 0  # removed by the agent's own cap while we were at it
    segments_deleted: int = 0  # of the source
    left_out: list[str] = field(default_factory=list)  # which and why
    remnants_removed: int = 0  # files that an interrupted run left
    seconds: float = 0.0

    def json(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "pod": self.pod,
            "batches": [
                {
                    "hour": batch.hour,
                    "name": batch.name,
                    "segments": len(batch.segments),
                    "rows": {table: file.rows for table, file in batch.files.items()},
                    "bytes": batch.bytes,
                }
                for batch in self.batches
            ],
            "segments_rolled": sum(len(batch.segments) for batch in self.batches),
            "segments_before": self.segments_before,
            "segments_waiting": self.segments_waiting,
            "segments_gone": self.segments_gone,
            "segments_deleted": self.segments_deleted,
            "segments_left_out": len(self.left_out),
            "left_out": self.left_out,
            "remnants_removed": self.remnants_removed,
            "rows": sum(batch.rows for batch in self.batches),
            "bytes": sum(batch.bytes for batch in self.batches),
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class _Segment:
    number: int
    begun_ns: int
    files: Mapping[str, Path]


def roll(
    recording: Path,
    store: Store,
    pod: str,
    *,
    unfinished_hour: bool = False,
    delete_source: bool = False,
    is_masked: bool = True,
    now_ns: int | None = None,
    tell: Callable[[str], None] = lambda _line: None,
) -> Rolled:
    """`unfinished_hour`: also what there is of an hour that is not over; the rest becomes a batch
    of its own later. Raises DsagentError: no recording there (exit 2), or the store refuses."""
    begun = time.monotonic()
    now_ns = time.time_ns() if now_ns is None else now_ns
    read_meta(recording)
    done = Rolled(store.url, pod)
    hours: dict[str, list[_Segment]] = {}
    for segment in _segments(recording, done, now_ns):
        hours.setdefault(hour_of(segment.begun_ns), []).append(segment)
    whole: list[Batch] = []
    for hour, segments in sorted(hours.items()):
        before = _batches_before(store, hour, pod, done)
        known = {pair for batch in before for pair in batch.segments.items()}
        rest = [each for each in segments if (each.number, each.begun_ns) not in known]
        done.segments_before += len(segments) - len(rest)
        whole += before
        if rest and not unfinished_hour and now_ns < hour_end_ns(hour) + SETTLED_NS:
            done.segments_waiting += len(rest)
        elif rest:
            batch = _roll_hour(rest, store, hour, pod, is_masked, done)
            if batch is not None:
                done.batches.append(batch)
                tell(
                    f"{hour}: {len(batch.segments)} segments, {batch.rows:,} rows, "
                    f"{batch.bytes / 1e6:.1f} MB"
                )
    if delete_source:
        _delete(recording, hours, [*whole, *done.batches], store, done)
    done.seconds = time.monotonic() - begun
    return done


def _segments(recording: Path, done: Rolled, now_ns: int) -> Iterator[_Segment]:
    """In order; one whose beginning cannot be read is left out."""
    for number, files in sorted(closed_segments(recording).items()):
        try:
            yield _Segment(number, _begun_ns(files, now_ns), files)
        except FileNotFoundError:
            done.segments_gone += 1
        except Unreadable as why:
            done.left_out.append(str(why))


def _begun_ns(files: Mapping[str, Path], now_ns: int) -> int:
    """When its first batch came in: every segment has a row for that."""
    if POLLS.name not in files:
        some = next(iter(files.values()))
        raise Unreadable(f"{some}: its segment has no file {POLLS.name}")
    path = files[POLLS.name]
    times = read_capped(path, POLLS)["unix_ns"].to_pylist()
    if not times or not EARLIEST_NS <= times[0] <= now_ns + CLOCK_AHEAD_NS:
        raise Unreadable(f"{path}: says no time at which it can have been written")
    first: int = times[0]
    return first


def _batches_before(store: Store, hour: str, pod: str, done: Rolled) -> list[Batch]:
    """The whole ones; what belongs to none is a remnant of a run that was interrupted, and goes.
    A manifest that cannot be read is told, and everything of that hour left as it is."""
    batches = []
    for found in list(store.list(rolled_folder(hour, pod))):
        place = place_of(found.path)
        if place is None or place.path != found.path:
            continue
        try:
            batches.append(parse_manifest(found.path, store.read(found.path)))
        except BadManifest as why:
            raise DsagentError(
                f"{store.url}/{found.path}: {why}; move it away to roll that hour again"
            ) from why
    names = {batch.name for batch in batches}
    for table in TABLES:
        folder = raw_path(table.name, hour, pod, "").rpartition("/")[0]
        for found in list(store.list(folder)):
            place = place_of(found.path)
            if place is not None and place.name not in names:
                store.delete(found.path)
                done.remnants_removed += 1
    return batches


def _roll_hour(
    segments: list[_Segment], store: Store, hour: str, pod: str, is_masked: bool, done: Rolled
) -> Batch | None:
    taken: dict[int, int] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="dsagent-roll-") as folder:
            writer = BatchWriter(Path(folder), is_masked=is_masked)
            for segment in segments:
                try:
                    writer.add(read_segment(segment.files))
                except FileNotFoundError:
                    done.segments_gone += 1
                except Unreadable as why:
                    done.left_out.append(str(why))
                else:
                    taken[segment.number] = segment.begun_ns
            files = writer.close()
            if not taken:
                return None
            name = f"{taken[min(taken)]}-{min(taken):08d}-{max(taken):08d}"
            rolled = {}
            for table, path in files.items():
                target = raw_path(table, hour, pod, name)
                digest = store.put(path, target)
                rolled[table] = RolledFile(target, writer.rows[table], digest.bytes, digest.sha256)
            batch = Batch(pod, hour, name, taken, rolled, is_masked)
            manifest = Path(folder) / "manifest.json"
            manifest.write_bytes(manifest_text(batch))
            store.put(manifest, f"{rolled_folder(hour, pod)}/{name}.json")
            return batch
    except OSError as error:
        where = f" (TMPDIR is {tempfile.gettempdir()})"
        raise DsagentError(f"cannot roll {hour}: {error.strerror or error}{where}") from error


def _delete(
    recording: Path,
    hours: Mapping[str, list[_Segment]],
    batches: list[Batch],
    store: Store,
    done: Rolled,
) -> None:
    """Removes the segments that are in verified batches, requests first."""
    lock = os.open(recording, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DsagentError(
                f"{recording}: an agent is recording there, so nothing of it was deleted; its "
                "--record-max-bytes keeps it small"
            ) from None
        safe = {
            pair for batch in batches if _is_there(batch, store) for pair in batch.segments.items()
        }
        for segment in (each for segments in hours.values() for each in segments):
            if (segment.number, segment.begun_ns) in safe:
                for table in reversed(TABLES):
                    if table.name in segment.files:
                        segment.files[table.name].unlink(missing_ok=True)
                done.segments_deleted += 1
    finally:
        os.close(lock)


def _is_there(batch: Batch, store: Store) -> bool:
    """Whether the store holds, byte for byte, what the manifest says."""
    found = {name: store.digest(file.path) for name, file in batch.files.items()}
    return all(
        digest is not None and (digest.bytes, digest.sha256) == (file.bytes, file.sha256)
        for file, digest in zip(batch.files.values(), found.values(), strict=True)
    )
