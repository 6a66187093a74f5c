"""The engine's end: whole, sealed, one record after another, and never in the engine's way."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable

import pytest

from dsagent.instrumentation import layout, ring_writer
from dsagent.instrumentation.records import Phase, RankStep, RequestRecord, Step, request_key
from dsagent.instrumentation.ring import RingReader, RingWriter, Role, find_rings

OpenRing = Callable[[RingWriter], RingReader]
HEAD = (1, 1_000, 2_000, 1, 2, 3, 4, 5, 0, 3, 0, 3, 0, 10, 100, 1, False)


def test_the_file_is_anonymous_sealed_and_closed_on_exec(writer: RingWriter) -> None:
    (candidate,) = [c for c in find_rings(os.getpid()) if c.inode == writer.inode]
    link = os.readlink(f"/proc/self/fd/{candidate.fd}")
    assert link == "/memfd:dsagent.steps (deleted)"
    seals = fcntl.fcntl(candidate.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert not os.get_inheritable(candidate.fd)
    for size in (0, layout.HEADER_BYTES, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(candidate.fd, size)


def test_the_header_is_where_others_look_for_it(writer: RingWriter) -> None:
    """BPF programs and other versions know these offsets: they are spelled out here on purpose."""
    (candidate,) = [c for c in find_rings(os.getpid()) if c.inode == writer.inode]
    writer.step_started(42, 4_200)
    header = os.pread(candidate.fd, 4096, 0)
    assert struct.unpack_from("<8sII", header, 0) == (b"dsagstep", 1, 2)
    assert struct.unpack_from("<QQQ", header, 64) == (42, 4_200, 4_200)
    writer.heartbeat(5_000)
    assert struct.unpack_from("<QQQ", os.pread(candidate.fd, 4096, 0), 64) == (42, 4_200, 5_000)
    writer.idle(6_000)
    assert struct.unpack_from("<QQQ", os.pread(candidate.fd, 4096, 0), 64) == (0, 0, 6_000)


def test_records_come_out_in_order_round_and_round(
    writer: RingWriter, open_ring: OpenRing, make_step: Callable[..., Step]
) -> None:
    reader = open_ring(writer)
    sizes = (0, 1, 5, 64, 300)
    for step_id in range(1, 600):  # some 14 times round the ring, records over its end included
        step = make_step(step_id, shares=sizes[step_id % len(sizes)])
        writer.write(step)
        assert reader.read() == [step]
    assert reader.counters.written == reader.counters.read == 599
    assert reader.counters.uncounted_loss == 0


def test_the_fast_way_writes_what_the_general_way_writes(
    writer: RingWriter, open_ring: OpenRing
) -> None:
    reader = open_ring(writer)
    rows = [("a", True, 100, 16, 16, 0, False), ("b", False, 1, 0, 77, 1, True)]
    writer.write_step(HEAD, rows)
    (step,) = reader.read()
    assert isinstance(step, Step)
    assert [share.request_key for share in step.shares] == [request_key("a"), request_key("b")]
    assert [share.phase for share in step.shares] == [Phase.PREFILL, Phase.DECODE]
    assert [share.scheduled_tokens for share in step.shares] == [100, 1]
    assert [share.cached_tokens for share in step.shares] == [16, 0]
    assert [share.context_tokens for share in step.shares] == [16, 77]
    assert [share.output_tokens for share in step.shares] == [0, 1]
    assert [share.recompute for share in step.shares] == [False, True]
    writer.write(step)
    assert reader.read() == [step]


def test_shares_beyond_the_limit_are_counted_not_written(
    writer: RingWriter, open_ring: OpenRing, make_step: Callable[..., Step]
) -> None:
    reader = open_ring(writer)
    rows = [(f"r{number}", False, 1, 0, 10, 1, False) for number in range(1_500)]
    writer.write_step(HEAD, rows)
    writer.write(make_step(2, shares=1_025))
    fast, general = reader.read()
    assert isinstance(fast, Step)
    assert isinstance(general, Step)
    assert (len(fast.shares), fast.shares_omitted) == (1_024, 476)
    assert (len(general.shares), general.shares_omitted) == (1_024, 1)
    assert reader.health().shares_omitted == 476


def test_the_largest_records_fit(
    writer: RingWriter, open_ring: OpenRing, make_record: Callable[..., RequestRecord]
) -> None:
    reader = open_ring(writer)
    long = "x" * 10_000
    writer.write(
        make_record(
            request_id=long,
            model=long,
            operation=long,
            tenant=long,
            external_id=long,
            finish_reason=long,
            error=long,
        )
    )
    writer.write(RankStep(1, 2, 3, 4, 5, 6, 7, None))
    assert len(reader.read()) == 2
    assert writer.failures == 0


def test_a_failure_inside_is_counted_and_kept_from_the_engine(
    writer: RingWriter, open_ring: OpenRing, make_step: Callable[..., Step]
) -> None:
    reader = open_ring(writer)
    bad_rows = [("a", False, -1, 0, 10, 1, False)]
    writer.write_step(HEAD, bad_rows)
    writer.write_step((1, 2), [])  # type: ignore[arg-type]
    writer.write(None)  # type: ignore[arg-type]
    writer.step_started(-1, 0)
    assert writer.failures == 4
    writer.write(make_step(1))
    assert reader.read() == [make_step(1)]
    assert (reader.health().failures, reader.health().switched_off) == (4, False)


def test_one_that_always_fails_switches_itself_off(
    writer: RingWriter, open_ring: OpenRing, make_step: Callable[..., Step]
) -> None:
    reader = open_ring(writer)
    for _ in range(ring_writer.FAILURES_IN_A_ROW - 1):
        writer.write(None)  # type: ignore[arg-type]
    writer.write(make_step(1))  # a success in between begins the count anew
    for _ in range(ring_writer.FAILURES_IN_A_ROW):
        writer.write(None)  # type: ignore[arg-type]
    writer.write(make_step(2))
    assert reader.read() == [make_step(1)]
    health = reader.health()
    assert health.switched_off
    assert health.failures == 2 * ring_writer.FAILURES_IN_A_ROW - 1
    assert health.unwritten == health.failures + 1
    assert reader.counters.uncounted_loss == 0


def test_closing_is_told_and_final(
    writer: RingWriter, open_ring: OpenRing, make_step: Callable[..., Step]
) -> None:
    reader = open_ring(writer)
    assert reader.health().closed_ns is None
    inode = writer.inode
    writer.write(make_step(1))
    writer.step_started(2, 2_000)
    writer.close()
    writer.close()
    writer.write(make_step(2))
    writer.step_started(3, 1)
    writer.idle(1)
    assert reader.read() == [make_step(1)]
    assert reader.health().closed_ns
    assert reader.running()[0] == 0
    # What is left is the reader's own.
    assert writer.inode is None
    reader.close()
    assert inode not in [candidate.inode for candidate in find_rings(os.getpid())]


@pytest.mark.parametrize("capacity", [0, 100_000, 64 << 10, 128 << 20, -1])
def test_a_capacity_must_be_a_power_of_two_in_bounds(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        RingWriter(role=Role.FRONTEND, engine_id=1, capacity_bytes=capacity)


def test_the_key_cache_does_not_grow_for_ever() -> None:
    keys = ring_writer.KeyCache()
    for number in range(40_000):
        assert keys[f"r{number}"] == request_key(f"r{number}")
    assert len(keys) <= 16_384
