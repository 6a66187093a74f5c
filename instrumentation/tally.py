"""Counts that an engine hands over now and then, beside its steps: how its experts are loaded, how
many drafted tokens were accepted at each position. What was counted since the last one of its kind.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

MAX_COUNTS = 1024
MAX_LABEL_BYTES = 128

# what, index, rank, start, end, number of counts, bytes of the label
_TALLY = struct.Struct("<BIIQQHH")
_MOST = (1 << 63) - 1


class What(IntEnum):
    """What is counted."""

    EXPERT_TOKENS = 0  # tokens routed to each expert of one layer, in the steps looked at
    DRAFTS_ACCEPTED = 1  # drafts, then how many were accepted at each position


@dataclass(frozen=True, slots=True)
class Tally:
    """One group of counts. Times are CLOCK_MONOTONIC nanoseconds."""

    engine_id: int
    pid: int
    what: What
    index: int  # of the layer among those with experts, as they are run; else 0
    rank: int
    start_ns: int
    end_ns: int
    label: str  # the layer's name
    counts: tuple[int, ...]


def encode_tally(tally: Tally) -> bytes:
    """Raises ValueError for more counts than a record holds."""
    if len(tally.counts) > MAX_COUNTS:
        raise ValueError(f"{len(tally.counts)} counts")
    label = tally.label.encode("utf-8", "replace")
    if len(label) > MAX_LABEL_BYTES:
        label = label[:MAX_LABEL_BYTES].decode("utf-8", "ignore").encode()
    head = _TALLY.pack(
        tally.what, tally.index, tally.rank, tally.start_ns, tally.end_ns,
        len(tally.counts), len(label),
    )  # fmt: skip
    return head + struct.pack(f"<{len(tally.counts)}Q", *tally.counts) + label


def decode_tally(payload: bytes, engine_id: int, pid: int) -> Tally:
    """Raises ValueError or struct.error for anything that `encode_tally` would not have made."""
    what, index, rank, start_ns, end_ns, count, label_bytes = _TALLY.unpack_from(payload)
    if (
        count > MAX_COUNTS
        or label_bytes > MAX_LABEL_BYTES
        or not start_ns <= end_ns <= _MOST
        or len(payload) != _TALLY.size + 8 * count + label_bytes
    ):
        raise ValueError("a tally out of bounds")
    counts = struct.unpack_from(f"<{count}Q", payload, _TALLY.size)
    if any(each > _MOST for each in counts):
        raise ValueError("a count beyond 63 bits")
    return Tally(
        engine_id=engine_id,
        pid=pid,
        what=What(what),
        index=index,
        rank=rank,
        start_ns=start_ns,
        end_ns=end_ns,
        label=payload[_TALLY.size + 8 * count :].decode("utf-8"),
        counts=counts,
    )
