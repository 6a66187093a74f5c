"""Where things are in a step ring; both ends of the shared memory read this.

A ring is an anonymous memory file: one header page, then `capacity` bytes of
data. All numbers are little-endian. Positions count units of 8 bytes since the
ring was made and are kept modulo 2**32, as sequence numbers are, so that a
position and the sequence number that belongs to it fit one word (`pack_mark`)
and can be stored, and read, in one go.

A record in the data is a frame: crc32 of all that follows, size in bytes (frame
header and payload, without padding), sequence number (the first is 1), kind;
each u32; then the payload, padded to a unit. Frames run on over the end of the
data to its beginning.
"""

from __future__ import annotations

import struct
from enum import IntEnum

RING_NAME = "dsagent.steps"
RING_LINK = f"/memfd:{RING_NAME} (deleted)"  # as /proc/PID/fd/N and /proc/PID/maps show it

MAGIC = int.from_bytes(b"dsagstep", "little")
VERSION = 1

HEADER_BYTES = 4096
UNIT_BYTES = 8
DEFAULT_CAPACITY_BYTES = 4 << 20
MIN_CAPACITY_BYTES = 128 << 10
MAX_CAPACITY_BYTES = 64 << 20
MAX_SHARES = 1024
MAX_RECORD_BYTES = 32 << 10

# Offsets in the header, in bytes. BPF programs know the three running ones.
RUNNING_STEP_AT = 64  # 0: idle
RUNNING_START_AT = 72  # ns; 0 while the two words change
HEARTBEAT_AT = 80  # ns
HEAD_AT = 96  # mark: end of the last complete record, number of records
RESERVED_AT = 104  # position (64 bits) up to which the writer may be writing
FAILURES_AT = 112  # what went wrong inside the writer, and was kept from the engine
SWITCHED_OFF_AT = 120  # 1: failed too often in a row and writes no more
UNWRITTEN_AT = 128  # records that could not be written
SHARES_OMITTED_AT = 136
CLOSED_AT = 144  # ns; the writer said goodbye
# Marks of record boundaries, one each capacity / CHECKPOINTS_PER_LAP: where a reader
# that comes late, or was lapped, finds the beginning of a record.
CHECKPOINTS_AT = 1024
CHECKPOINTS_PER_LAP = 64
CHECKPOINT_SLOTS = 128

FLAG_EXPORTS_SPANS = 1
FLAG_VLLM = 2  # the process is vLLM's; otherwise the bundled engine's

# The part that never changes, at 0: magic, version, role, engine_id, pid and tid as the writer
# knows them, capacity (bytes, a power of two), flags, when it was made (ns).
HEADER = struct.Struct("<QIIQIIQQQ")

MASK32 = (1 << 32) - 1

FRAME = struct.Struct("<IIII")  # crc32, size, sequence number, kind


class Role(IntEnum):
    """What the thread that writes a ring does in the engine."""

    FRONTEND = 1
    SCHEDULER = 2
    RANK = 3


class RecordKind(IntEnum):
    STEP = 1
    RANK_STEP = 2
    REQUEST_OPEN = 3
    REQUEST_CLOSE = 4
    TALLY = 5


def pack_mark(position: int, sequence: int) -> int:
    return (sequence & MASK32) << 32 | position & MASK32


def unpack_mark(mark: int) -> tuple[int, int]:
    """(position, sequence number), both modulo 2**32."""
    return mark & MASK32, mark >> 32


def distance(later: int, earlier: int) -> int:
    """How far `later` lies ahead of `earlier`, both modulo 2**32."""
    return (later - earlier) & MASK32
