"""The BPF programs' messages, read from their ring buffer. bpf/outside.h has the same layout."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from dsagent.agent.sources.bpf.libbpf import Map

_HEAD = struct.Struct("=QQQQIIIHBB8s")
_LENGTH = struct.Struct("=I")
_RING_HEADER_BYTES = 8
_BUSY = 1 << 31  # reserved, not yet committed
_DISCARDED = 1 << 30


class MessageKind(IntEnum):
    RECEIVED = 1
    SENT = 2
    PEER_CLOSED = 3
    CLOSED = 4
    CIPHERED = 5
    UNREAD = 6
    MARK = 7
    LOCAL = 8


@dataclass(frozen=True, slots=True)
class Message:
    """One thing that the programs told. Times are CLOCK_MONOTONIC nanoseconds; 0: not known."""

    kind: MessageKind
    connection: int
    time_ns: int
    arrived_ns: int
    step: int
    pid: int
    tid: int
    length: int
    data: bytes
    tail: bytes


def parse_message(record: bytes) -> Message | None:
    """None where it is none."""
    if len(record) < _HEAD.size:
        return None
    connection, time_ns, arrived_ns, step, pid, tid, length, copied, kind, tail_length, tail = (
        _HEAD.unpack_from(record)
    )
    if kind not in _KINDS:
        return None
    data = record[_HEAD.size : _HEAD.size + copied]
    return Message(
        MessageKind(kind),
        connection,
        time_ns,
        arrived_ns,
        step,
        pid,
        tid,
        length,
        data,
        tail[: min(tail_length, 8)],
    )


_KINDS = frozenset(MessageKind)


class MessageRing:
    """The consumer's end of a ring of records of any length. One thread uses it."""

    def __init__(self, ring: Map) -> None:
        page, size = mmap.PAGESIZE, ring.entries
        self._consumer_memory = mmap.mmap(
            ring.fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        )
        # The producer's page, then the data twice in a row, so that no record ever wraps.
        self._memory = mmap.mmap(
            ring.fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        self._consumer = memoryview(self._consumer_memory)[:8].cast("Q")
        self._producer = memoryview(self._memory)[:8].cast("Q")
        self._page, self._mask = page, size - 1

    def read(self, most: int) -> Iterator[Message]:
        """At most `most` messages, in the order in which they were reserved."""
        position, end = self._consumer[0], self._producer[0]
        for _ in range(most):
            if position >= end:
                break
            at = self._page + (position & self._mask)
            (word,) = _LENGTH.unpack_from(self._memory, at)
            if word & _BUSY:
                break
            length = word & ~(_BUSY | _DISCARDED)
            start = at + _RING_HEADER_BYTES
            record = self._memory[start : start + length]
            position += (_RING_HEADER_BYTES + length + 7) & ~7
            self._consumer[0] = position
            if not word & _DISCARDED and (message := parse_message(record)) is not None:
                yield message

    @property
    def waiting(self) -> bool:
        """Whether something lies there unread."""
        return self._producer[0] > self._consumer[0]

    def close(self) -> None:
        self._consumer.release()
        self._producer.release()
        self._consumer_memory.close()
        self._memory.close()
