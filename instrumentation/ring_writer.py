"""The engine's end of a step ring: it never waits and never fails into the engine.

One thread writes a ring. Whatever goes wrong inside is counted in the header;
after `FAILURES_IN_A_ROW` failures without a success the writer switches itself
off. A forked child leaves its parent's rings alone and makes its own with the
first thing it writes.

Words that others read while they change are stored through
`memoryview.cast("Q")`, one aligned 8-byte store each. A record becomes visible
by three of them around a copy: the reserved position first (whoever reads those
bytes now knows that they change), the bytes, the head last. Where a machine
lets others see stores in another order, the CRC of what is read early is wrong
and the record is counted as rejected.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
import weakref
import zlib
from collections.abc import Sequence

from dsagent.instrumentation import layout
from dsagent.instrumentation.layout import MAX_SHARES, UNIT_BYTES, RecordKind, Role
from dsagent.instrumentation.records import request_key
from dsagent.instrumentation.rows import ShareRow, StepHead
from dsagent.instrumentation.wire import Record, encode, step_struct

FAILURES_IN_A_ROW = 16
_KEYS_KEPT = 16_384

_HEAD = layout.HEAD_AT // 8
_RESERVED = layout.RESERVED_AT // 8
_RUNNING_STEP = layout.RUNNING_STEP_AT // 8
_RUNNING_START = layout.RUNNING_START_AT // 8
_HEARTBEAT = layout.HEARTBEAT_AT // 8
_FAILURES = layout.FAILURES_AT // 8
_UNWRITTEN = layout.UNWRITTEN_AT // 8
_SHARES_OMITTED = layout.SHARES_OMITTED_AT // 8
_CHECKPOINTS = layout.CHECKPOINTS_AT // 8

_FRAME_BYTES = layout.FRAME.size


class KeyCache(dict[str, int]):
    """request id → request_key; forgets everything when full, which costs a hash each."""

    def __missing__(self, request_id: str) -> int:
        if len(self) >= _KEYS_KEPT:
            self.clear()
        key = self[request_id] = request_key(request_id)
        return key


class _Memory:
    """The memory file, mapped. Whole from the start: it is sealed as soon as it has its header,
    since a reader may come at any time, and allocated before anything is stored, so that a full
    machine fails here and not in a store, by SIGBUS."""

    def __init__(self, header: bytes, capacity_bytes: int) -> None:
        size = layout.HEADER_BYTES + capacity_bytes
        # Kept open beside the map's own duplicate: a reader may be about to open this number.
        self._fd = os.memfd_create(layout.RING_NAME, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, size)
            os.pwrite(self._fd, header, 0)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
            os.posix_fallocate(self._fd, 0, size)
            self.inode = os.fstat(self._fd).st_ino
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        whole = memoryview(self._map)
        self.words = whole[: layout.HEADER_BYTES].cast("Q")
        self.data = whole[layout.HEADER_BYTES :]
        whole.release()
        # Mapped in now: a BPF program that reads it cannot wait for a page fault.
        self.words[layout.RUNNING_STEP_AT // 8] = 0

    def close(self) -> None:
        self.words.release()
        self.data.release()
        self._map.close()
        os.close(self._fd)


class RingWriter:
    """Writes one ring. To be made by the thread that will write it.

    `capacity_bytes` is a power of two. Raises OSError where the kernel gives no
    memory file, ValueError for a wrong capacity; no other method raises.
    """

    def __init__(
        self,
        *,
        role: Role | int,
        engine_id: int,
        exports_spans: bool = False,
        vllm: bool = False,
        capacity_bytes: int = layout.DEFAULT_CAPACITY_BYTES,
    ) -> None:
        if (
            not layout.MIN_CAPACITY_BYTES <= capacity_bytes <= layout.MAX_CAPACITY_BYTES
            or capacity_bytes & (capacity_bytes - 1)
        ):
            raise ValueError(f"capacity must be a power of two in bounds, not {capacity_bytes}")
        self._role = Role(role)
        self._engine_id = engine_id
        self._flags = layout.FLAG_EXPORTS_SPANS * exports_spans | layout.FLAG_VLLM * vllm
        self._capacity = capacity_bytes
        self._checkpoint_units = capacity_bytes // layout.CHECKPOINTS_PER_LAP // UNIT_BYTES
        self._scratch = bytearray(layout.MAX_RECORD_BYTES)
        self._scratch_view = memoryview(self._scratch)
        self._keys = KeyCache()
        self._closed = False
        self._memory: _Memory | None = None
        self._open()
        _writers.add(self)

    def _open(self) -> _Memory:
        """A fresh ring for this process and thread."""
        header = layout.HEADER.pack(
            layout.MAGIC,
            layout.VERSION,
            self._role,
            self._engine_id,
            os.getpid(),
            threading.get_native_id(),
            self._capacity,
            self._flags,
            time.monotonic_ns(),
        )
        memory = _Memory(header, self._capacity)
        self._position = 0  # units written since the ring was made
        self._sequence = 0
        self._next_checkpoint = 0
        self._failures_in_a_row = 0
        self._on = True
        self._memory = memory
        return memory

    def _live(self) -> _Memory | None:
        """The ring to write to, made anew in a fork; None once closed or given up."""
        if self._memory is None and self._on and not self._closed:
            return self._open()
        return self._memory

    @property
    def inode(self) -> int | None:
        """Of the memory file; None in a fork that has not written yet, and after `close`."""
        return None if self._memory is None else self._memory.inode

    @property
    def failures(self) -> int:
        """What went wrong inside and was kept from the engine, as the header counts it."""
        return 0 if self._memory is None else self._memory.words[_FAILURES]

    @property
    def is_on(self) -> bool:
        """Not switched off after too many failures."""
        return self._on

    def write(self, record: Record) -> None:
        """Append one record of any kind."""
        try:
            kind, payload = encode(record)
            end = _FRAME_BYTES + len(payload)
            self._scratch[_FRAME_BYTES:end] = payload
            self._publish(kind, end)
        except Exception:  # noqa: BLE001  the engine must not see it; it is counted
            self.count_failure()

    def write_step(self, head: StepHead, shares: Sequence[ShareRow]) -> None:
        """Append a step, fast: no objects made per share."""
        try:
            columns = zip(*shares, strict=True) if shares else ((),) * 7
            ids, prefill, scheduled, cached, context, output, recompute = columns
        except Exception:  # noqa: BLE001  the engine must not see it; it is counted
            self.count_failure()
            return
        self.write_columns(head, ids, scheduled, cached, context, output, prefill, recompute)

    def write_columns(self, head: StepHead, ids: Sequence[str], *columns: Sequence[int]) -> None:
        """Append a step whose shares come as columns: request ids, then scheduled, cached, context
        and output tokens, is_prefill, is_recompute."""
        try:
            omitted = max(0, len(ids) - MAX_SHARES)
            if omitted:
                ids = ids[:MAX_SHARES]
                columns = tuple(column[:MAX_SHARES] for column in columns)
            count = len(ids)
            scheduled, cached, context, output, prefill, recompute = columns
            *numbers, admission, graph = head
            packer = step_struct(count)
            packer.pack_into(
                self._scratch, _FRAME_BYTES, *numbers, omitted, admission, graph, count,
                *map(self._keys.__getitem__, ids), *scheduled, *cached, *context, *output,
                *prefill, *recompute,
            )  # fmt: skip
            self._publish(RecordKind.STEP, _FRAME_BYTES + packer.size)
            if omitted and self._memory is not None:
                self._memory.words[_SHARES_OMITTED] += omitted
        except Exception:  # noqa: BLE001  the engine must not see it; it is counted
            self.count_failure()

    def _publish(self, kind: int, end: int) -> None:
        """Copy the frame lying in the scratch, `end` bytes long, into the ring."""
        memory = self._live()
        if memory is None:
            return
        words = memory.words
        if not self._on:
            words[_UNWRITTEN] += 1
            return
        position = self._position
        sequence = self._sequence + 1
        scratch = self._scratch
        layout.FRAME.pack_into(scratch, 0, 0, end, sequence & layout.MASK32, kind)
        crc = zlib.crc32(self._scratch_view[4:end])
        scratch[0:4] = crc.to_bytes(4, "little")
        units = -(-end // UNIT_BYTES)
        new_position = position + units

        words[_RESERVED] = new_position
        start = position * UNIT_BYTES & (self._capacity - 1)
        padded = units * UNIT_BYTES
        room = self._capacity - start
        if padded <= room:
            memory.data[start : start + padded] = self._scratch_view[:padded]
        else:
            memory.data[start:] = self._scratch_view[:room]
            memory.data[: padded - room] = self._scratch_view[room:padded]
        if position >= self._next_checkpoint:
            lap = position // self._checkpoint_units
            words[_CHECKPOINTS + lap % layout.CHECKPOINT_SLOTS] = layout.pack_mark(
                position, self._sequence
            )
            self._next_checkpoint = (lap + 1) * self._checkpoint_units
        self._position = new_position
        self._sequence = sequence
        words[_HEAD] = layout.pack_mark(new_position, sequence)
        self._failures_in_a_row = 0

    def count_failure(self) -> None:
        """Something went wrong in here, or in what feeds it, and was kept from the engine."""
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FAILURES_IN_A_ROW:
            self._on = False
        memory = self._memory
        if memory is None:
            return  # a fork that got no memory file has nowhere to count
        try:
            words = memory.words
            words[_FAILURES] += 1
            words[_UNWRITTEN] += 1
            words[layout.SWITCHED_OFF_AT // 8] = not self._on
        except ValueError:
            return  # closed by another thread meanwhile: nowhere to count

    def count_unwritten(self, records: int) -> None:
        """Somebody did not even make them, since it is switched off."""
        memory = self._memory
        if memory is None:
            return
        try:
            memory.words[_UNWRITTEN] += records
        except ValueError:
            return  # closed by another thread meanwhile: nowhere to count

    def step_started(self, step_id: int, start_ns: int) -> None:
        """Say which step runs. The start is 0 in between, so that a reader of both knows."""
        try:
            memory = self._live()
            if memory is not None:
                words = memory.words
                words[_RUNNING_START] = 0
                words[_RUNNING_STEP] = step_id
                words[_RUNNING_START] = start_ns
                words[_HEARTBEAT] = start_ns
        except Exception:  # noqa: BLE001  the engine must not see it; it is counted
            self.count_failure()

    def heartbeat(self, now_ns: int) -> None:
        try:
            memory = self._live()
            if memory is not None:
                memory.words[_HEARTBEAT] = now_ns
        except Exception:  # noqa: BLE001  the engine must not see it; it is counted
            self.count_failure()

    def idle(self, now_ns: int) -> None:
        """Say that no step runs."""
        try:
            memory = self._live()
            if memory is not None:
                words = memory.words
                words[_RUNNING_START] = 0
                words[_RUNNING_STEP] = 0
                words[_HEARTBEAT] = now_ns
        except Exception:  # noqa: BLE001  the engine must not see it; it is counted
            self.count_failure()

    def close(self) -> None:
        """Say goodbye and let go; a reader that mapped the ring can still read it."""
        if self._closed:
            return
        self._closed = True
        memory, self._memory = self._memory, None  # a thread that writes now finds none
        if memory is not None:
            memory.words[_RUNNING_STEP] = 0
            memory.words[layout.CLOSED_AT // 8] = time.monotonic_ns()
            memory.close()

    def _forget(self) -> None:
        """In a forked child: the ring is the parent's."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


_writers: weakref.WeakSet[RingWriter] = weakref.WeakSet()


def _forget_the_parents_rings() -> None:
    for writer in list(_writers):
        writer._forget()


os.register_at_fork(after_in_child=_forget_the_parents_rings)
