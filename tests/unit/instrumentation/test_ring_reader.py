"""The agent's end: it reads what is sound, counts what it lost, and believes nothing."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsagent.instrumentation import layout
from dsagent.instrumentation.records import Step
from dsagent.instrumentation.ring import (
    RingCandidate,
    RingCounters,
    RingReader,
    RingRejected,
    RingWriter,
    Role,
    find_rings,
    step_word_address,
)

OpenRing = Callable[[RingWriter], RingReader]
MakeStep = Callable[..., Step]
CAPACITY = 128 << 10
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def candidate_of(fd: int) -> RingCandidate:
    return RingCandidate(os.getpid(), fd, os.fstat(fd).st_ino)


@pytest.fixture
def memory_file() -> Iterator[Callable[..., int]]:
    """Makes memory files that are rings but for what the test changes."""
    opened: list[int] = []

    def make(
        content: bytes = b"",
        *,
        name: str = "dsagent.steps",
        size: int = layout.HEADER_BYTES + CAPACITY,
        seals: int = SEALS,
    ) -> int:
        fd = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        opened.append(fd)
        os.ftruncate(fd, size)
        os.pwrite(fd, content, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    yield make
    for fd in opened:
        os.close(fd)


def header(
    *,
    magic: int = layout.MAGIC,
    version: int = layout.VERSION,
    role: int = 2,
    pid: int | None = None,
    capacity: int = CAPACITY,
) -> bytes:
    page = bytearray(layout.HEADER_BYTES)
    own = os.getpid() if pid is None else pid
    struct.pack_into("<QIIQIIQ", page, 0, magic, version, role, 9, own, own, capacity)
    return bytes(page)


def test_a_sound_empty_ring_is_accepted(memory_file: Callable[..., int]) -> None:
    reader = RingReader.open(candidate_of(memory_file(header())))
    assert reader.read() == []
    assert reader.running() == (0, 0, 0)
    assert (reader.header.role, reader.header.pid) == (Role.SCHEDULER, os.getpid())
    reader.close()
    reader.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seals": 0}, "not sealed"),
        ({"seals": fcntl.F_SEAL_GROW}, "not sealed"),
        ({"seals": fcntl.F_SEAL_SHRINK}, "not sealed"),
        ({"name": "dsagent.stepz"}, "not named dsagent.steps"),
        ({"size": 0, "content": b""}, "its size is 0"),
        ({"size": layout.HEADER_BYTES}, "its size is 4096"),
        ({"size": 1 << 40}, "its size is"),
        ({"size": layout.HEADER_BYTES + 3 * CAPACITY}, "claims a capacity"),
        ({"content": b""}, "not a ring's"),
        ({"content": header(magic=1)}, "not a ring's"),
        ({"content": header(version=2)}, "version 2; this agent reads version 1"),
        ({"content": header(role=77)}, "its role is 77"),
        ({"content": header(capacity=CAPACITY * 2)}, "claims a capacity"),
        ({"content": header(capacity=2**63)}, "claims a capacity"),
        ({"content": header(pid=1)}, "made by another process"),
    ],
)
def test_what_is_no_ring_is_rejected_with_its_reason(
    memory_file: Callable[..., int], changes: dict[str, object], reason: str
) -> None:
    fd = memory_file(**({"content": header()} | changes))
    with pytest.raises(RingRejected, match=reason):
        RingReader.open(candidate_of(fd))


def test_a_rejected_ring_stays_not_mapped_or_open(memory_file: Callable[..., int]) -> None:
    fd = memory_file(header(version=9))
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(RingRejected):
        RingReader.open(candidate_of(fd))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert step_word_address(os.getpid(), os.fstat(fd).st_ino) is None


def test_a_file_on_disk_a_pipe_and_a_fifo_are_rejected_unopened(tmp_path: Path) -> None:
    regular = tmp_path / "memfd:dsagent.steps (deleted)"
    regular.write_bytes(header() + bytes(CAPACITY))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pipe = os.pipe()
    opened = [
        os.open(regular, os.O_RDONLY),
        os.open(fifo, os.O_RDWR),  # opening it for reading only would wait for a writer
        os.open("/dev/zero", os.O_RDONLY),
        *pipe,
    ]
    for fd in opened:
        with pytest.raises(RingRejected, match="not a memory file"):
            RingReader.open(candidate_of(fd))
        os.close(fd)


def test_another_owner_is_rejected(memory_file: Callable[..., int]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a file away")
    fd = memory_file(header())
    os.fchown(fd, 12_345, -1)
    with pytest.raises(RingRejected, match="another user"):
        RingReader.open(candidate_of(fd))


def test_a_descriptor_that_went_or_changed_is_rejected(memory_file: Callable[..., int]) -> None:
    fd = memory_file(header())
    with pytest.raises(RingRejected, match="another file by now"):
        RingReader.open(replace(candidate_of(fd), inode=2**40))
    with pytest.raises(RingRejected, match="cannot open"):
        RingReader.open(replace(candidate_of(fd), fd=10_000))
    with pytest.raises(RingRejected, match="cannot open"):
        RingReader.open(replace(candidate_of(fd), pid=2**22))


def test_a_process_that_is_gone_has_no_rings() -> None:
    with pytest.raises(FileNotFoundError):
        find_rings(2**22)
    assert step_word_address(2**22, 1) is None


def test_the_running_words_address_is_that_of_the_writers_map(writer: RingWriter) -> None:
    assert writer.inode is not None
    address = step_word_address(os.getpid(), writer.inode)
    assert address is not None
    assert address % mmap.PAGESIZE == 64
    writer.step_started(0xABCDEF, 1)
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        assert int.from_bytes(memory.read(8), "little") == 0xABCDEF


def test_a_late_reader_begins_with_what_is_still_there(
    writer: RingWriter, open_ring: OpenRing, make_step: MakeStep
) -> None:
    early = [make_step(step_id) for step_id in range(1, 101)]
    for step in early:
        writer.write(step)
    reader = open_ring(writer)
    assert reader.read() == early  # nothing was overwritten yet
    for step_id in range(101, 5_000):
        writer.write(make_step(step_id))
    late = open_ring(writer)
    got = late.read()
    assert got == [make_step(step_id) for step_id in range(5_000 - len(got), 5_000)]
    assert len(got) * 200 > CAPACITY // 2  # most of the ring
    assert late.counters.written == late.counters.read == len(got)
    assert late.counters.uncounted_loss == 0


def test_one_that_was_lapped_counts_what_it_missed_and_goes_on(
    writer: RingWriter, open_ring: OpenRing, make_step: MakeStep
) -> None:
    reader = open_ring(writer)
    for step_id in range(1, 10_001):
        writer.write(make_step(step_id))
    got = reader.read()
    counters = reader.counters
    assert got == [make_step(step_id) for step_id in range(10_001 - len(got), 10_001)]
    assert counters.lapped == 10_000 - len(got) > 0
    assert (counters.written, counters.torn, counters.rejected) == (10_000, 0, 0)
    assert counters.uncounted_loss == 0


def test_what_is_overwritten_while_it_is_read_is_torn(
    writer: RingWriter, open_ring: OpenRing, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_ring(writer)
    for step_id in range(1, 101):
        writer.write(make_step(step_id))
    copy = reader._copy

    def overtaken(units: int) -> bytes:
        """The writer goes round between our copying and our asking."""
        monkeypatch.undo()
        taken = copy(units)
        for step_id in range(101, 2_001):
            writer.write(make_step(step_id))
        return taken

    monkeypatch.setattr(reader, "_copy", overtaken)
    got = reader.read()
    counters = reader.counters
    assert got == [make_step(step_id) for step_id in range(2_001 - len(got), 2_001)]
    assert counters.torn == 1
    assert counters.lapped == 2_000 - 1 - len(got)
    assert counters.uncounted_loss == 0


def test_a_limit_leaves_the_rest_for_the_next_call(
    writer: RingWriter, open_ring: OpenRing, make_step: MakeStep
) -> None:
    reader = open_ring(writer)
    for step_id in range(1, 11):
        writer.write(make_step(step_id))
    assert reader.read(max_records=4) == [make_step(step_id) for step_id in range(1, 5)]
    assert (reader.counters.pending, reader.counters.uncounted_loss) == (6, 0)
    assert len(reader.read()) == 6
    assert reader.counters.pending == 0


def words_and_data(ring: RingWriter) -> tuple[memoryview, memoryview]:
    """The writer's own writable map: a hostile writer may do as it likes."""
    memory = ring._memory
    assert memory is not None
    return memory.words, memory.data


def test_a_damaged_record_costs_no_more_than_those_up_to_the_next_boundary(
    writer: RingWriter, open_ring: OpenRing, make_step: MakeStep
) -> None:
    reader = open_ring(writer)
    for step_id in range(1, 201):
        writer.write(make_step(step_id))
    _, data = words_and_data(writer)
    data[20_000] ^= 1
    got = reader.read()
    counters = reader.counters
    assert counters.rejected > 0
    assert counters.read == len(got) == 200 - counters.rejected
    # A boundary each 1/64 of the ring.
    assert counters.rejected * 200 < 2 * CAPACITY // layout.CHECKPOINTS_PER_LAP
    assert counters.uncounted_loss == 0


def test_a_record_of_a_later_kind_is_rejected_alone(
    writer: RingWriter, open_ring: OpenRing, make_step: MakeStep
) -> None:
    reader = open_ring(writer)
    writer.write(make_step(1))
    writer._publish(99, layout.FRAME.size + 24)
    writer.write(make_step(2))
    assert reader.read() == [make_step(1), make_step(2)]
    assert (reader.counters.rejected, reader.counters.uncounted_loss) == (1, 0)


def test_a_valid_crc_does_not_excuse_nonsense(
    writer: RingWriter, open_ring: OpenRing, make_step: MakeStep
) -> None:
    reader = open_ring(writer)
    writer.write(make_step(1, end_ns=0))
    writer.write(make_step(2))
    assert reader.read() == [make_step(2)]
    assert (reader.counters.rejected, reader.counters.uncounted_loss) == (1, 0)


def test_an_uncounted_loss_is_seen_not_assumed_away(
    writer: RingWriter, open_ring: OpenRing, make_step: MakeStep
) -> None:
    """A writer that counts three records more than it wrote."""
    reader = open_ring(writer)
    writer.write(make_step(1))
    words, _ = words_and_data(writer)
    position, sequence = layout.unpack_mark(words[layout.HEAD_AT // 8])
    words[layout.HEAD_AT // 8] = layout.pack_mark(position, sequence + 3)
    assert reader.read() == [make_step(1)]
    assert reader.counters.uncounted_loss == 3


def test_one_that_wants_the_newest_begins_near_the_end_and_counts_nothing_before_it(
    make_step: MakeStep,
) -> None:
    ring = RingWriter(role=Role.SCHEDULER, engine_id=make_step(1).engine_id, capacity_bytes=1 << 20)
    for step_id in range(1, 6_001):  # once round and on
        ring.write(make_step(step_id))
    (candidate,) = [c for c in find_rings(os.getpid()) if c.inode == ring.inode]
    reader = RingReader.open(candidate, newest_bytes=128 << 10)
    got = reader.read()
    assert got == [make_step(step_id) for step_id in range(6_001 - len(got), 6_001)]
    assert 100 << 10 < len(got) * 200 < 128 << 10
    assert reader.counters == RingCounters(written=len(got), read=len(got))
    reader.close()
    ring.close()


@pytest.mark.parametrize(
    ("units", "records", "reason"),
    [
        (-1, 0, "its head went backwards"),
        (-1, -1, "its head went backwards"),
        (1 << 30, 1, "further than anyone can write"),
        (0, 1, "more records than it has room for"),
        (10, 6, "more records than it has room for"),
        (0, -1, "more records than it has room for"),
        (50, 0, "more records than it counts"),
    ],
)
def test_a_ring_whose_counts_cannot_be_is_read_no_more(
    writer: RingWriter,
    open_ring: OpenRing,
    make_step: MakeStep,
    units: int,
    records: int,
    reason: str,
) -> None:
    for step_id in range(1, 11):
        writer.write(make_step(step_id))
    reader = open_ring(writer)
    assert len(reader.read()) == 10
    words, _ = words_and_data(writer)
    head = words[layout.HEAD_AT // 8]
    position, sequence = layout.unpack_mark(head)
    if "than it counts" in reason:  # two whole records, none of them counted
        writer.write(make_step(11))
        writer.write(make_step(12))
    words[layout.HEAD_AT // 8] = layout.pack_mark(position + units, sequence + records)
    assert reader.read() == []
    assert reason in reader.refused
    words[layout.HEAD_AT // 8] = head
    assert reader.read() == []  # for good
    assert reader.counters == RingCounters(written=10, read=10)


def test_a_boundary_that_lies_behind_what_was_read_is_not_gone_to(
    writer: RingWriter, open_ring: OpenRing, make_step: MakeStep
) -> None:
    """Else what a lapped reader missed would be four milliards."""
    reader = open_ring(writer)
    for step_id in range(1, 11):
        writer.write(make_step(step_id))
    assert len(reader.read()) == 10
    for step_id in range(11, 2_001):
        writer.write(make_step(step_id))
    words, _ = words_and_data(writer)
    first = layout.CHECKPOINTS_AT // 8
    for slot in range(first, first + layout.CHECKPOINT_SLOTS):
        position, _ = layout.unpack_mark(words[slot])
        words[slot] = layout.pack_mark(position, 9)
    reader.read()
    assert reader.counters.lapped == 1_990
    assert reader.counters.uncounted_loss == 0


def test_positions_and_numbers_may_go_round_their_32_bits(
    open_ring: OpenRing, make_step: MakeStep
) -> None:
    ring = RingWriter(role=Role.SCHEDULER, engine_id=1, capacity_bytes=CAPACITY)
    per_ring = CAPACITY // layout.UNIT_BYTES
    ring._position = 2**32 - per_ring  # a lap before the end, at the ring's beginning
    ring._sequence = 2**32 - 40
    ring._next_checkpoint = 0
    ring.write(make_step(1))
    reader = open_ring(ring)
    for step_id in range(2, 2_000):
        ring.write(make_step(step_id))
        (step,) = reader.read() if step_id > 2 else reader.read()[-1:]
        assert isinstance(step, Step)
        assert step.step_id == step_id
    late = open_ring(ring)
    assert 0 < len(late.read()) < 2_000
    for counters in (reader.counters, late.counters):
        assert counters.written == counters.read
        assert counters.uncounted_loss == 0
    ring.close()


EDGES = st.sampled_from([0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
WORDS = st.sampled_from(
    [
        *range(19),
        *range(layout.CHECKPOINTS_AT // 8, layout.CHECKPOINTS_AT // 8 + layout.CHECKPOINT_SLOTS),
    ]
)


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    written=st.integers(0, 900),
    header_changes=st.lists(st.tuples(WORDS, EDGES | st.integers(0, 2**64 - 1)), max_size=6),
    data_changes=st.lists(
        st.tuples(st.integers(0, CAPACITY - 1), st.binary(min_size=1, max_size=64)), max_size=6
    ),
    more=st.integers(0, 50),
)
def test_whatever_the_bytes_only_records_that_were_written_come_out(
    make_step: MakeStep,
    written: int,
    header_changes: list[tuple[int, int]],
    data_changes: list[tuple[int, bytes]],
    more: int,
) -> None:
    ring = RingWriter(role=Role.SCHEDULER, engine_id=1, capacity_bytes=CAPACITY)
    for step_id in range(1, written + 1):
        ring.write(make_step(step_id))
    readers = []
    try:
        (candidate,) = [c for c in find_rings(os.getpid()) if c.inode == ring.inode]
        readers.append(RingReader.open(candidate))
        words, data = words_and_data(ring)
        for index, value in header_changes:
            words[index] = value
        for at, garbage in data_changes:
            end = min(at + len(garbage), CAPACITY)
            data[at:end] = garbage[: end - at]
        try:
            readers.append(RingReader.open(candidate))
        except RingRejected:
            assert header_changes
        for reader in readers:
            for _ in range(3):
                for record in reader.read():
                    assert isinstance(record, Step)
                    assert record.shares == make_step(record.step_id).shares
                reader.running()
                reader.health()
                for step_id in range(written + 1, written + more + 1):
                    ring.write(make_step(step_id))
            counters = reader.counters
            assert counters.read <= written + 10 * more
            assert min(counters.lapped, counters.torn, counters.rejected) >= 0
            assert counters.uncounted_loss >= 0
    finally:
        for reader in readers:
            reader.close()
        ring.close()


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    head=st.integers(0, 2**64 - 1),
    frames=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 15, 16, 17, 24, 40_000, 2**32 - 1]) | st.integers(0, 400),
            st.integers(0, 2**32 - 1),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=40,
    ),
)
def test_frames_of_any_size_and_number_are_survived(
    memory_file: Callable[..., int], head: int, frames: list[tuple[int, int, int, bool]]
) -> None:
    data = bytearray()
    for number, (size, sequence, kind, honest) in enumerate(frames):
        frame = bytearray(max(16, min(size, 400)))
        struct.pack_into("<III", frame, 4, size, number + 1 if honest else sequence, kind)
        struct.pack_into("<I", frame, 0, zlib.crc32(frame[4:]))
        data += frame + bytes(-len(frame) % 8)
    page = bytearray(header())
    reader = RingReader.open(candidate_of(fd := memory_file(header())))
    for mark in (layout.pack_mark(len(data) // 8, len(frames)), head, 2**64 - 1):
        struct.pack_into("<Q", page, layout.HEAD_AT, mark)
        os.pwrite(fd, bytes(page) + data, 0)
        assert len(reader.read()) <= len(frames)
    reader.close()


def test_a_ring_full_of_broken_records_is_given_up_in_little_time(
    writer: RingWriter, open_ring: OpenRing, make_step: MakeStep
) -> None:
    """Each frame says it is one, none is: work stays bounded, and the rest is for later calls."""
    reader = open_ring(writer)
    words, data = words_and_data(writer)
    count = CAPACITY // 16
    for number in range(count):
        struct.pack_into("<IIII", data, number * 16, 0, 16, number + 1, 1)
    words[layout.HEAD_AT // 8] = layout.pack_mark(CAPACITY // 8, count)
    words[layout.RESERVED_AT // 8] = CAPACITY // 8
    while reader.read() or reader.counters.pending:
        assert reader.counters.uncounted_loss == 0
    assert reader.counters.rejected == count
