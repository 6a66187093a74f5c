"""Records to write, and rings in this very process to read back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from dsagent.instrumentation.records import Admission, Phase, RequestRecord, Share, Step
from dsagent.instrumentation.ring import RingReader, RingWriter, Role, find_rings

ENGINE_ID = 0x1234_5678_9ABC_DEF0


@pytest.fixture
def make_step() -> Callable[..., Step]:
    """A step whose every field follows from its id."""

    def make(step_id: int, shares: int = 3, **changes: object) -> Step:
        fields: dict[str, object] = {
            "engine_id": ENGINE_ID,
            "step_id": step_id,
            "pid": os.getpid(),
            "tid": os.getpid(),
            "start_ns": step_id * 1_000,
            "end_ns": step_id * 1_000 + 900,
            "schedule_ns": 100,
            "prepare_ns": 50,
            "forward_ns": 600,
            "sample_ns": 100,
            "output_ns": 50,
            "prefill_tokens": 0,
            "decode_tokens": shares,
            "waiting": step_id % 7,
            "running": shares,
            "preempted": 0,
            "kv_blocks_used": shares * 2,
            "kv_blocks_total": 1024,
            "admission": Admission.NO_PLACE,
            "graph": False,
            "shares": tuple(
                Share(step_id << 12 | number + 1, Phase.DECODE, 1, 0, step_id % 1000, 1, False)
                for number in range(shares)
            ),
        }
        return Step(**(fields | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_record() -> Callable[..., RequestRecord]:
    """A request that ran from 1,000 to 9,000 ns."""

    def make(**changes: object) -> RequestRecord:
        fields: dict[str, object] = {
            "request_key": 77,
            "request_id": "cmpl-1",
            "trace_id": 0xA << 120 | 1,
            "span_id": 0xB << 60,
            "parent_span_id": 0xC << 60,
            "sampled": True,
            "operation": "chat",
            "model": "smollm2",
            "tenant": None,
            "external_id": None,
            "pid": os.getpid(),
            "tid": os.getpid(),
            "received_ns": 1_000,
            "tokenised_ns": 1_100,
            "queued_ns": 1_200,
            "first_scheduled_ns": 2_000,
            "first_token_ns": 4_000,
            "first_sent_ns": 4_100,
            "finished_ns": 8_900,
            "sent_ns": 9_000,
            "prompt_tokens": 12,
            "output_tokens": 5,
            "cached_tokens": 0,
            "max_tokens": 16,
            "temperature": 0.0,
            "top_p": None,
            "finish_reason": "stop",
            "error": None,
        }
        return RequestRecord(**(fields | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    """A small ring, so that tests can go round it."""
    ring = RingWriter(role=Role.SCHEDULER, engine_id=ENGINE_ID, capacity_bytes=128 << 10)
    yield ring
    ring.close()


@pytest.fixture
def open_ring() -> Iterator[Callable[[RingWriter], RingReader]]:
    """Opens a writer's ring as another process would, through /proc."""
    readers: list[RingReader] = []

    def open_(ring: RingWriter) -> RingReader:
        (candidate,) = [c for c in find_rings(os.getpid()) if c.inode == ring.inode]
        readers.append(RingReader.open(candidate))
        return readers[-1]

    yield open_
    for reader in readers:
        reader.close()
