"""The agent's end of a step ring: trusts nothing, waits for nothing, counts what it loses.

A reader copies a stretch of the ring into memory of its own, then asks whether
the writer has begun to overwrite any of it; only what was left alone is parsed,
and only from the copy. A reader that comes late, or was lapped, goes on from the
oldest checkpoint that leaves it a quarter of the ring to stay ahead of the
writer. Each call does a bounded amount of work whatever the bytes say, and a
ring whose counts cannot be true is read no more.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, replace

from dsagent.instrumentation import layout
from dsagent.instrumentation.layout import MASK32, UNIT_BYTES, distance, unpack_mark
from dsagent.instrumentation.ring_find import RingCandidate, RingHeader, map_ring, read_header
from dsagent.instrumentation.wire import Malformed, Origin, Record, decode

_CHUNK_UNITS = (256 << 10) // UNIT_BYTES
_TROUBLES_A_CALL = 16
_FRAME = layout.FRAME
_LEAST_RECORD_UNITS = _FRAME.size // UNIT_BYTES
_MOST_UNITS_A_NS = 1  # 8 GB/s: more than a writer that makes a CRC of it all can do
_BACKWARDS = 1 << 31  # a distance from here on leads backwards


@dataclass(slots=True)
class RingCounters:
    """Records since this reader began. All are exact for a sound writer that is less than
    2**31 units of 8 bytes (16 GiB) ahead."""

    written: int = 0  # by the writer's own count, where this reader last looked
    pending: int = 0  # of these, not yet reached
    read: int = 0
    lapped: int = 0  # overwritten before they were read
    torn: int = 0  # overwritten while they were read
    rejected: int = 0  # there, but invalid

    @property
    def uncounted_loss(self) -> int:
        """Must be 0, so it is computed."""
        return self.written - self.pending - self.read - self.lapped - self.torn - self.rejected


@dataclass(frozen=True, slots=True)
class WriterHealth:
    """What the writer says of itself; not checked, since nothing depends on it."""

    failures: int
    switched_off: bool
    unwritten: int  # records it could not write
    shares_omitted: int
    closed_ns: int | None


class RingReader:
    """Reads one ring; one thread calls it. See `RingReader.open`."""

    def __init__(self, candidate: RingCandidate, newest_bytes: int | None) -> None:
        self.inode = candidate.inode
        self._map = map_ring(candidate)
        whole = memoryview(self._map)
        self._words = whole[: layout.HEADER_BYTES].cast("Q")
        self._data = whole[layout.HEADER_BYTES :]
        whole.release()
        try:
            self.header: RingHeader = read_header(self._words, candidate, len(self._data))
        except BaseException:
            self.close()
            raise
        self._capacity_units = self.header.capacity_bytes // UNIT_BYTES
        self._origin = Origin(
            engine_id=self.header.engine_id,
            pid=self.header.pid,
            tid=self.header.tid,
            self_exported=self.header.exports_spans,
        )
        self.counters = RingCounters()
        self.refused = ""  # why it is read no more
        self._looked_ns = time.monotonic_ns()
        self._head, self._known = unpack_mark(self._words[layout.HEAD_AT // 8])
        within_units = self._capacity_units * 3 // 4
        if newest_bytes is not None:
            within_units = min(within_units, newest_bytes // UNIT_BYTES)
        # Of what has been passed. `written` counts from here.
        self._position, self._sequence = self._boundary(within_units, MASK32)
        self.counters.written = self.counters.pending = distance(self._known, self._sequence)

    @classmethod
    def open(cls, candidate: RingCandidate, *, newest_bytes: int | None = None) -> RingReader:
        """Begins with the oldest record at a checkpoint within three quarters of a ring, or
        within the `newest_bytes` of it. What lies before is not of interest, so it counts nowhere.

        Raises RingRejected with the reason where this is no ring to be read.
        """
        return cls(candidate, newest_bytes)

    def close(self) -> None:
        """Let go of the map; may be called twice."""
        self._words.release()
        self._data.release()
        self._map.close()

    def running(self) -> tuple[int, int, int]:
        """(running step_id, its start_ns, heartbeat_ns); step 0 started at 0 means idle."""
        words = self._words
        heartbeat_ns = words[layout.HEARTBEAT_AT // 8]
        for _ in range(3):
            # Starts only grow and are 0 while the words change: two equal readings of it
            # around that of the step say that the three belong together.
            start_ns = words[layout.RUNNING_START_AT // 8]
            step_id = words[layout.RUNNING_STEP_AT // 8]
            if start_ns and start_ns == words[layout.RUNNING_START_AT // 8]:
                return step_id, start_ns, heartbeat_ns
        return 0, 0, heartbeat_ns

    def health(self) -> WriterHealth:
        words = self._words
        return WriterHealth(
            failures=words[layout.FAILURES_AT // 8],
            switched_off=bool(words[layout.SWITCHED_OFF_AT // 8]),
            unwritten=words[layout.UNWRITTEN_AT // 8],
            shares_omitted=words[layout.SHARES_OMITTED_AT // 8],
            closed_ns=words[layout.CLOSED_AT // 8] or None,
        )

    def read(self, max_records: int = 10_000) -> list[Record]:
        """The next records, oldest first; at most so many, and a bounded amount of work.

        Nothing from a ring that counts what cannot be: `refused` says why, and its counters stay
        as they were when they last made sense.
        """
        if self.refused:
            return []
        sane = replace(self.counters)
        records: list[Record] = []
        self._look()
        troubles = 0
        while not self.refused and self._position != self._head and len(records) < max_records:
            if troubles == _TROUBLES_A_CALL:
                break  # a writer that fast, or a ring that broken, may not hold us up for ever
            if distance(self._head, self._position) > self._capacity_units or self._overwritten():
                self.counters.lapped += self._skip()
                troubles += 1
                continue
            if not self._read_stretch(records, max_records):
                troubles += 1
        if self._position == self._head:
            self.counters.pending = 0
            if distance(self._known, self._sequence) < _BACKWARDS:
                # What the writer counted but never wrote stays in `written`: an uncounted loss.
                self._sequence = self._known
        else:
            self.counters.pending = distance(self._known, self._sequence)
        if self.counters.uncounted_loss < 0:
            self.refused = self.refused or "it holds more records than it counts"
        if self.refused:
            self.counters = sane
            return []
        return records

    def _look(self) -> None:
        """See how far the writer is, and whether it can be."""
        now_ns = time.monotonic_ns()
        head, sequence = unpack_mark(self._words[layout.HEAD_AT // 8])
        moved, counted = distance(head, self._head), distance(sequence, self._known)
        most_units = (now_ns - self._looked_ns) * _MOST_UNITS_A_NS + self._capacity_units
        if moved >= _BACKWARDS:
            self.refused = "its head went backwards"
        elif moved > most_units:
            self.refused = "its head moved further than anyone can write"
        elif counted * _LEAST_RECORD_UNITS > moved:
            self.refused = "it counts more records than it has room for"
        else:
            self.counters.written += counted
            self._looked_ns, self._head, self._known = now_ns, head, sequence

    def _overwritten(self) -> bool:
        """Whether the writer may have begun to write over the record at our position."""
        reserved = self._words[layout.RESERVED_AT // 8] & MASK32
        return distance(reserved, self._position) > self._capacity_units

    def _boundary(self, within_units: int, within_records: int) -> tuple[int, int]:
        """(position, sequence number) at the oldest record boundary known that lies less than
        `within_units` behind the head, and at most `within_records`; the head itself where there
        is none."""
        best_behind, best = 0, (self._head, self._known)
        first = layout.CHECKPOINTS_AT // 8
        for slot in range(first, first + layout.CHECKPOINT_SLOTS):
            position, sequence = unpack_mark(self._words[slot])
            behind = distance(self._head, position)
            # A record takes some units, so a mark with more records than that is a lie.
            most_records = min(behind // _LEAST_RECORD_UNITS, within_records)
            if best_behind < behind < within_units and (
                distance(self._known, sequence) <= most_records
            ):
                best_behind, best = behind, (position, sequence)
        return best

    def _skip(self) -> int:
        """Go on from the next record boundary known; how many records that passes over."""
        self._look()
        ahead = min(distance(self._head, self._position), self._capacity_units * 3 // 4)
        left = distance(self._known, self._sequence)
        self._position, self._sequence = self._boundary(ahead, left)
        return left - distance(self._known, self._sequence)

    def _copy(self, units: int) -> bytes:
        start = self._position * UNIT_BYTES & (self.header.capacity_bytes - 1)
        size = units * UNIT_BYTES
        first = bytes(self._data[start : start + size])
        return first if len(first) == size else first + bytes(self._data[: size - len(first)])

    def _read_stretch(self, records: list[Record], max_records: int) -> bool:
        """Parse at most a chunk of what lies ahead; False where something had to be given up."""
        units = min(distance(self._head, self._position), _CHUNK_UNITS)
        copy = self._copy(units)
        if self._overwritten():
            # The record at our position changed while it was copied; those behind it that
            # are gone by now were only overtaken.
            self.counters.torn += 1
            self.counters.lapped += max(0, self._skip() - 1)
            return False
        at = 0
        while at < len(copy) and len(records) < max_records:
            frame = self._frame(copy, at)
            if frame is None:
                if at:
                    return True  # cut off by the copy's end, or not all visible yet: look again
                self.counters.rejected += self._skip()
                return False
            kind, size = frame
            try:
                records.append(decode(kind, copy[at + _FRAME.size : at + size], self._origin))
                self.counters.read += 1
            except Malformed:
                self.counters.rejected += 1
            padded_units = -(-size // UNIT_BYTES)
            at += padded_units * UNIT_BYTES
            self._position = self._position + padded_units & MASK32
            self._sequence = self._sequence + 1 & MASK32
        return True

    def _frame(self, copy: bytes, at: int) -> tuple[int, int] | None:
        """(kind, size) of the frame there; None where it is not the one that must be there."""
        if len(copy) - at < _FRAME.size:
            return None
        crc, size, sequence, kind = _FRAME.unpack_from(copy, at)
        if (
            not _FRAME.size <= size <= min(layout.MAX_RECORD_BYTES, len(copy) - at)
            or sequence != (self._sequence + 1) & MASK32
            or zlib.crc32(copy[at + 4 : at + size]) != crc
        ):
            return None
        return kind, size
