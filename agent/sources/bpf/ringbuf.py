"""The BPF ring buffer read in batches: mapped, looked at as one array, copied once.

Every record has the same size, a power of two, so that the ring is an array of
records. (A call-back for each record cost a two-threaded engine a factor of
four on two CPUs.)
"""

from __future__ import annotations

import mmap

import numpy as np

from dsagent.agent.facts import Facts, no_facts
from dsagent.agent.sources.bpf.layout import RECORD
from dsagent.agent.sources.bpf.libbpf import Map

_BUSY = 1 << 31  # reserved, not yet committed
_DISCARDED = 1 << 30


class FactRing:
    """The consumer's end. One thread uses it."""

    def __init__(self, ring: Map) -> None:
        page, size = mmap.PAGESIZE, ring.entries
        self._consumer_memory = mmap.mmap(
            ring.fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        )
        # The producer's page, then the data twice in a row, so that no batch ever wraps.
        self._memory = mmap.mmap(
            ring.fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        self._consumer = memoryview(self._consumer_memory).cast("Q")
        self._producer = memoryview(self._memory)[:8].cast("Q")
        self._records = np.frombuffer(self._memory, RECORD, offset=page)
        self._mask = size - 1

    def read(self, most: int) -> Facts:
        """At most `most` facts, in the order in which they were reserved."""
        position, end = self._consumer[0], self._producer[0]
        count = min((end - position) // RECORD.itemsize, most)
        if count == 0:
            return no_facts()
        first = (position & self._mask) // RECORD.itemsize
        records = self._records[first : first + count]
        lengths = records["length"]
        busy = np.flatnonzero(lengths & _BUSY)
        if busy.size:
            records, lengths = records[: busy[0]], lengths[: busy[0]]
        kept = (lengths & _DISCARDED) == 0
        facts: Facts = records["fact"][kept]  # a copy: the ring may be written over from here on
        self._consumer[0] = position + len(records) * RECORD.itemsize
        return facts

    def close(self) -> None:
        self._records = np.empty(0, RECORD)
        self._consumer.release()
        self._producer.release()
        self._consumer_memory.close()
        self._memory.close()
