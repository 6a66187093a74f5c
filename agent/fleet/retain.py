"""Applies a retention policy: adds hours up, then deletes what is older than its tier is kept.

A raw batch goes only when an hourly wave that holds it has been read back from the store. Only
files of the layout are ever deleted, and a batch's manifest last: an interrupted run is finished
by the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.fleet.hourly import MAX_BATCHES, Wave, add_up, parse_wave
from dsagent.agent.fleet.layout import HOUR_NS, Place, hour_end_ns, place_of
from dsagent.agent.fleet.manifest import BadManifest, Batch, parse_manifest
from dsagent.agent.fleet.policy import Policy
from dsagent.agent.fleet.store import Store

SETTLED_NS = HOUR_NS  # after its end most pods have rolled; what is later becomes a wave of its own


@dataclass(slots=True)
class Deleted:
    files: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Retained:
    """What one run did, or with `dry_run` would do. `deleted`: (tier, hour) → what."""

    store: str
    dry_run: bool
    waves: list[Wave] = field(default_factory=list)
    batches_added_up: int = 0
    deleted: dict[tuple[str, str], Deleted] = field(default_factory=dict)
    raw_kept: list[str] = field(default_factory=list)  # old, but not safely added up: which and why
    seconds: float = 0.0

    def json(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "dry_run": self.dry_run,
            "batches_added_up": self.batches_added_up,
            "waves": [
                {"hour": wave.hour, "name": wave.name, "sums": dict(wave.sums)}
                for wave in self.waves
            ],
            "deleted": [
                {"tier": tier, "hour": hour, "files": what.files, "bytes": what.bytes}
                for (tier, hour), what in sorted(self.deleted.items())
            ],
            "files_deleted": sum(what.files for what in self.deleted.values()),
            "bytes_deleted": sum(what.bytes for what in self.deleted.values()),
            "raw_kept": self.raw_kept,
            "seconds": self.seconds,
        }


def retain(
    store: Store,
    policy: Policy,
    *,
    dry_run: bool = False,
    now_ns: int | None = None,
    tell: Callable[[str], None] = lambda _line: None,
) -> Retained:
    """Raises DsagentError where the store refuses; an hour that cannot be added up keeps its raw
    files and is in `raw_kept`."""
    begun = time.monotonic()
    now_ns = time.time_ns() if now_ns is None else now_ns
    done = Retained(store.url, dry_run)
    committed: dict[str, list[Place]] = {}
    for place in _places(store, "rolled"):
        if not place.path.endswith(".part"):
            committed.setdefault(place.hour, []).append(place)
    safe: set[tuple[str, str, str]] = set()  # hour, pod, batch
    for hour, places in sorted(committed.items()):
        if hour_end_ns(hour) + SETTLED_NS <= now_ns:
            is_old = hour_end_ns(hour) + policy.raw_keep_ns <= now_ns
            safe |= _make_safe(store, hour, places, done, tell, is_old=is_old)
    _delete_raw(store, policy, done, now_ns, safe, committed)
    _delete_hourly(store, policy, done, now_ns)
    done.seconds = time.monotonic() - begun
    return done


def _places(store: Store, folder: str) -> list[Place]:
    return [place for found in store.list(folder) if (place := place_of(found.path)) is not None]


def _make_safe(
    store: Store,
    hour: str,
    places: list[Place],
    done: Retained,
    tell: Callable[[str], None],
    *,
    is_old: bool,
) -> set[tuple[str, str, str]]:
    """Adds up what has not been; gives what may be deleted, where `is_old` asks for that."""
    try:
        waves = _waves(store, hour)
        known = {member for wave in waves for member in wave.batches}
        missing = [place for place in places if (place.pod, place.name) not in known]
        done.batches_added_up += len(missing)
        if not done.dry_run:
            for first in range(0, len(missing), MAX_BATCHES):
                batches = [_batch(store, place) for place in missing[first : first + MAX_BATCHES]]
                wave = add_up(store, hour, batches)
                waves.append(wave)
                done.waves.append(wave)
                tell(f"{hour}: {len(batches)} batches added up, {wave.sums['requests']:,} requests")
    except (BadManifest, DsagentError) as why:
        done.raw_kept.append(f"{hour}: {why}")
        return set()
    if not is_old:
        return set()
    would = {(hour, place.pod, place.name) for place in missing} if done.dry_run else set()
    for wave in waves:
        if wave.is_there(store):
            would |= {(hour, pod, name) for pod, name in wave.batches}
        else:
            done.raw_kept.append(f"{hour}: wave {wave.name} is not as it was written")
    return would


def _waves(store: Store, hour: str) -> list[Wave]:
    return [
        parse_wave(place.path, store.read(place.path))
        for place in _places(store, f"aggregated/hour={hour}")
        if not place.path.endswith(".part")
    ]


def _batch(store: Store, place: Place) -> Batch:
    try:
        return parse_manifest(place.path, store.read(place.path))
    except BadManifest as why:
        raise BadManifest(f"{place.path}: {why}") from why


def _delete_raw(
    store: Store,
    policy: Policy,
    done: Retained,
    now_ns: int,
    safe: set[tuple[str, str, str]],
    committed: dict[str, list[Place]],
) -> None:
    """Old and safe, or old and never committed: what an interrupted roll has left."""
    whole = {(hour, each.pod, each.name) for hour, places in committed.items() for each in places}
    for tier in ("raw", "rolled"):  # the manifests last
        for found in store.list(tier):
            place = place_of(found.path)
            if place is None or hour_end_ns(place.hour) + policy.raw_keep_ns > now_ns:
                continue
            key = (place.hour, place.pod, place.name)
            if key in safe or key not in whole:
                _delete(store, place, found.bytes, done)


def _delete_hourly(store: Store, policy: Policy, done: Retained, now_ns: int) -> None:
    for tier in ("hourly", "aggregated"):
        for found in store.list(tier):
            place = place_of(found.path)
            if place is not None and hour_end_ns(place.hour) + policy.hourly_keep_ns <= now_ns:
                _delete(store, place, found.bytes, done)


def _delete(store: Store, place: Place, size: int, done: Retained) -> None:
    what = done.deleted.setdefault((place.tier, place.hour), Deleted())
    what.files += 1
    what.bytes += size
    if not done.dry_run:
        store.delete(place.path)
