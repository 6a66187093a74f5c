"""Rings that come, go, lie, or are not finished: real ones, of this process and of children."""

from __future__ import annotations

import fcntl
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import made
import pytest

from dsagent.agent.facts import Readings, Target
from dsagent.agent.host.procfs import read_stat
from dsagent.agent.sources import open_requests, ring_set, steps
from dsagent.agent.sources.open_requests import OpenRequests
from dsagent.agent.sources.plausible import SLACK_NS, plausible
from dsagent.agent.sources.ring_set import RingSet
from dsagent.agent.sources.steps import StepsSource
from dsagent.instrumentation import layout
from dsagent.instrumentation.records import (
    Phase,
    RankStep,
    RequestOpen,
    RequestRecord,
    Share,
    Step,
    request_key,
)
from dsagent.instrumentation.ring import RingWriter, Role
from dsagent.instrumentation.tally import Tally, What

S = 1_000_000_000

CHILD = """
import sys, time
from dsagent.instrumentation.records import RankStep
from dsagent.instrumentation.ring import RingWriter, Role
ring = RingWriter(role=Role.RANK, engine_id=9, capacity_bytes=128 << 10)
step = 0
for line in sys.stdin:
    if int(line) < 0:
        ring.close()
        ring = RingWriter(role=Role.RANK, engine_id=9, capacity_bytes=128 << 10)
    for _ in range(int(line)):
        step += 1
        now_ns = time.monotonic_ns()
        ring.write(RankStep(9, step, 0, 1, 1, now_ns - 1000, now_ns))
    print("done", flush=True)
"""


def own_target() -> Target:
    stat = read_stat(os.getpid())
    return Target(stat.pid, stat.start_ticks, 1, stat.comm, (), "reference")


@pytest.fixture
def child() -> Iterator[Callable[[int], None]]:
    """A process that writes so many rank steps into a ring of its own; told -1, it makes another
    one, told 0, it ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def write(steps: int) -> None:
        if not steps:
            process.communicate(timeout=60)
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    yield write
    if process.poll() is None:
        process.kill()
        process.communicate()


@pytest.fixture
def scheduler() -> Iterator[RingWriter]:
    ring = RingWriter(role=Role.SCHEDULER, engine_id=9, capacity_bytes=128 << 10)
    yield ring
    ring.close()


@pytest.fixture
def frontend() -> Iterator[RingWriter]:
    ring = RingWriter(role=Role.FRONTEND, engine_id=9, capacity_bytes=128 << 10)
    yield ring
    ring.close()


def ids(readings: Readings) -> list[int]:
    return [step.step_id for step in readings.rank_steps]


def test_an_ended_childs_ring_is_read_to_its_end_and_closed(
    child: Callable[[int], None], scheduler: RingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(3)
    source = StepsSource(own_target())
    source.start()
    assert ids(source.poll(0)) == [1, 2, 3]
    child(40)
    child(0)
    monkeypatch.setattr(steps, "MAX_RECORDS_A_POLL", 25)  # its rest takes two polls
    source.look_again()
    assert ids(source.poll(S)) == list(range(4, 29))
    assert len(source._rings.open) == 2
    assert ids(source.poll(S)) == list(range(29, 44))
    assert len(source._rings.open) == 1
    assert (source.status().dropped, source.uncounted_losses) == (0, 0)
    source.stop()


def test_what_is_never_read_of_a_ring_without_a_writer_is_counted(
    child: Callable[[int], None], scheduler: RingWriter
) -> None:
    child(3)
    rings = RingSet()
    rings.look(find_pids(), 0)
    child(5)
    for reader in rings.open.values():
        reader.read(1)
    child(0)
    rings.look([os.getpid()], S)
    assert rings.let_go(S) == []
    gone = rings.let_go(S + ring_set.LEAVE_NS)
    assert [reader.header.role for reader in gone] == [Role.RANK]
    assert (rings.dropped, rings.uncounted_loss) == (7, 0)
    rings.close()


def find_pids() -> list[int]:
    from dsagent.agent.host import procfs

    return [os.getpid(), *procfs.descendants(os.getpid(), procfs.parents())]


def test_rings_that_a_living_process_has_closed_make_room(
    monkeypatch: pytest.MonkeyPatch, child: Callable[[int], None], scheduler: RingWriter
) -> None:
    monkeypatch.setattr(ring_set, "MAX_RINGS", 3)
    source = StepsSource(own_target())
    child(1)
    source.start()
    assert ids(source.poll(0)) == [1]
    for step_id in range(2, 10):
        child(1)
        child(-1)
        source.look_again()
        assert ids(source.poll(0)) == [step_id]
        assert len(source._rings.open) == 2
    assert source.status().reason == ""
    source.stop()


def test_a_ring_seen_before_it_was_sealed_is_tried_again(scheduler: RingWriter) -> None:
    size = layout.HEADER_BYTES + layout.MIN_CAPACITY_BYTES
    source = StepsSource(own_target())
    fd = os.memfd_create(layout.RING_NAME, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        source.start()
        assert source.status().reason.startswith("a ring is refused: it is not sealed")
        pid = os.getpid()
        header = layout.HEADER.pack(
            layout.MAGIC, layout.VERSION, Role.RANK, 9, pid, pid, size - layout.HEADER_BYTES, 0, 1
        )
        os.ftruncate(fd, size)
        os.pwrite(fd, header, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        source.look_again()
        source.poll(0)
        assert source.status().reason == ""
        assert len(source._rings.open) == 2
    finally:
        os.close(fd)
        source.stop()


def test_refusals_are_bounded_and_do_not_keep_a_good_ring_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring_set, "MAX_REFUSED", 5)
    bad = [os.memfd_create(layout.RING_NAME, os.MFD_CLOEXEC) for _ in range(9)]
    rings = RingSet()
    try:
        assert rings.look([os.getpid()], 0) == []
        assert (len(rings.refused), rings.untried) == (5, 4)
        assert rings.refusals().startswith("5 rings are refused: ")
        assert "4 rings beyond" in rings.refusals()
        for _ in range(2):  # those tried are known by now: others have their turn first
            rings.look([os.getpid()], 0)
            assert len(rings.refused) == 5
    finally:
        for fd in bad:
            os.close(fd)
    rings.look([os.getpid()], 0)
    assert (rings.refused, rings.untried, rings.refusals()) == ({}, 0, "")


def test_rings_of_a_process_that_cannot_be_looked_into_just_now_stay(
    monkeypatch: pytest.MonkeyPatch, scheduler: RingWriter
) -> None:
    rings = RingSet()
    (reader,) = rings.look([os.getpid()], 0)

    def refuse(_pid: int) -> None:
        raise PermissionError

    monkeypatch.setattr(ring_set, "find_rings", refuse)
    rings.look([os.getpid()], 1)
    assert rings.let_go(1 << 62) == []
    assert list(rings.open.values()) == [reader]
    rings.close()


NOW = 1000 * S
STEP = made.step(1, start_ns=NOW - S)
CLOSED = made.record("r1", start_ns=NOW - 2 * S)
OPENED = RequestOpen(1, "r1", 1, 1, None, None, NOW - S, 1, 1)
RANK = RankStep(9, 1, 0, 1, 1, NOW - S, NOW - 1)
FAR = 1 << 62


@pytest.mark.parametrize(
    ("record", "can_be"),
    [
        (STEP, True),
        (CLOSED, True),
        (OPENED, True),
        (RANK, True),
        (replace(RANK, end_ns=NOW + SLACK_NS), True),  # read a moment after our clock was
        (replace(STEP, end_ns=FAR), False),
        (replace(STEP, end_ns=NOW + SLACK_NS + 1), False),
        (replace(STEP, start_ns=STEP.end_ns + 1), False),
        (replace(STEP, forward_ns=FAR), False),
        (replace(STEP, schedule_ns=-1), False),
        (replace(RANK, end_ns=FAR), False),
        (replace(RANK, start_ns=NOW), False),
        (replace(RANK, device_ns=FAR), False),
        (replace(OPENED, received_ns=FAR), False),
        (replace(OPENED, received_ns=-1), False),
        (replace(CLOSED, sent_ns=FAR), False),
        (replace(CLOSED, sent_ns=CLOSED.received_ns - 1), False),
        (replace(CLOSED, finished_ns=FAR), False),
        (replace(CLOSED, queued_ns=CLOSED.received_ns - 2 * S), False),
        (replace(CLOSED, queued_ns=CLOSED.received_ns - 2), True),  # for the join to clamp
        (replace(CLOSED, first_token_ns=None, first_sent_ns=None, finished_ns=None), True),
        (replace(STEP, prefill_tokens=1 << 24), True),
        (replace(STEP, prefill_tokens=(1 << 32) - 1), False),
        (replace(STEP, decode_tokens=(1 << 32) - 1), False),
        (replace(STEP, waiting=(1 << 32) - 1), False),
        (replace(STEP, preempted=(1 << 32) - 1), False),
        (replace(STEP, kv_blocks_total=(1 << 32) - 1), False),
        (replace(STEP, shares=(Share(1, Phase.DECODE, 1, 0, 1 << 31, 1, False),)), False),
        (replace(STEP, shares=(Share(1, Phase.PREFILL, 1 << 31, 0, 5, 0, False),)), False),
        (replace(CLOSED, prompt_tokens=FAR), False),
        (replace(CLOSED, output_tokens=FAR), False),
        (replace(CLOSED, cached_tokens=FAR), False),
        (replace(CLOSED, max_tokens=FAR), True),  # a caller may ask for it
        (replace(CLOSED, temperature=math.inf), False),
        (replace(CLOSED, top_p=-math.inf), False),
        (Tally(1, 1, What.EXPERT_TOKENS, 0, 0, NOW - S, NOW, "moe", (7, FAR)), False),
        (Tally(1, 1, What.EXPERT_TOKENS, 0, 0, NOW - S, NOW, "moe", (7, 8)), True),
    ],
)
def test_what_can_be_and_what_cannot(
    record: Step | RankStep | RequestOpen | RequestRecord | Tally, can_be: bool
) -> None:
    assert plausible(record, NOW) is can_be


def test_absurd_times_are_rejected_and_counted(scheduler: RingWriter) -> None:
    source = StepsSource(own_target())
    source.start()
    now_ns = time.monotonic_ns()
    good = RankStep(9, 1, 0, 1, 1, now_ns - 10, now_ns)
    for record in (good, replace(good, step_id=2, end_ns=FAR), replace(good, step_id=3)):
        scheduler.write(record)
    assert ids(source.poll(now_ns)) == [1, 3]
    assert (source.status().dropped, source.uncounted_losses) == (1, 0)
    source.stop()
    assert (source.status().dropped, source.uncounted_losses) == (1, 0)


def opened(name: str, received_ns: int) -> RequestOpen:
    return replace(OPENED, request_key=request_key(name), request_id=name,
                   received_ns=received_ns)  # fmt: skip


def test_a_request_whose_end_was_lost_is_forgotten_once_the_loop_is_idle(
    scheduler: RingWriter, frontend: RingWriter
) -> None:
    source = StepsSource(own_target())
    source.start()
    now_ns = time.monotonic_ns()
    frontend.write(opened("stale", now_ns - 5 * S))
    scheduler.step_started(1, now_ns)
    assert source.poll(now_ns).forgotten == []
    end_ns = now_ns
    frontend.write(replace(CLOSED, request_key=request_key("stale"), sent_ns=FAR))
    assert source.poll(now_ns).forgotten == []  # a step runs: it may be in it
    scheduler.idle(end_ns)
    frontend.write(opened("fresh", now_ns))
    assert source.poll(now_ns).forgotten == [request_key("stale")]
    assert source.oldest_open_ns() == now_ns
    assert source.unfinished == 2  # what is forgotten has not ended either
    # It came after the loss: that its end is missing means that the loop stands still.
    assert source.poll(now_ns + 60 * S).forgotten == []
    assert source.oldest_open_ns() == now_ns
    source.stop()


def test_without_losses_nothing_is_forgotten(frontend: RingWriter, scheduler: RingWriter) -> None:
    source = StepsSource(own_target())
    source.start()
    now_ns = time.monotonic_ns()
    frontend.write(opened("waits", now_ns - 5 * S))
    assert source.poll(now_ns).forgotten == []
    assert source.poll(now_ns + 60 * S).forgotten == []
    assert source.unfinished == 1
    frontend.write(replace(CLOSED, request_key=request_key("waits"), sent_ns=now_ns))
    source.poll(now_ns)
    assert source.unfinished == 0
    source.stop()


def test_a_ring_full_to_the_brim_is_begun_near_its_end_and_read_in_slices() -> None:
    """An engine that has been busy for long: what ended before we came is not worked through."""
    loop = RingWriter(role=Role.SCHEDULER, engine_id=9, capacity_bytes=512 << 10)
    front = RingWriter(role=Role.FRONTEND, engine_id=9, capacity_bytes=512 << 10)
    began_ns = time.monotonic_ns() - 60 * S
    for number in range(5_000):
        loop.write(made.step(number + 1, (f"r{number}",), start_ns=began_ns + number))
    names = [f"r{number}" for number in range(2_500)]
    for number, name in enumerate(names):
        front.write(opened(name, began_ns + number))
        if number != 2_490:
            front.write(made.record(name, start_ns=began_ns + number))
    source = StepsSource(own_target())
    source.start()
    now_ns = time.monotonic_ns()
    front.write(made.record("r2490", start_ns=now_ns, sent_ns=now_ns + 1))
    polls = [source.poll(now_ns)]
    while source.behind:
        polls.append(source.poll(now_ns))
    for each in polls:
        records = [*each.steps, *each.opened, *each.closed]
        assert len(records) <= steps.MAX_RECORDS_A_POLL
    assert 1 < len(polls) < 10
    taken = [step.step_id for each in polls for step in each.steps]
    assert taken == list(range(5_001 - len(taken), 5_001))
    # Nobody gets to see the requests that ended before, those whose begin was read are let go.
    assert [record.request_id for each in polls for record in each.closed] == ["r2490"]
    begun = {record.request_key for each in polls for record in each.opened}
    ended = {key for each in polls for key in each.forgotten}
    assert begun - ended == {request_key("r2490")}
    assert source.oldest_open_ns() is None
    assert (source.status().state, source.status().dropped) == ("ok", 0)
    assert source.uncounted_losses == 0
    source.stop()
    loop.close()
    front.close()


def test_a_ring_made_after_attaching_is_read_from_its_beginning(frontend: RingWriter) -> None:
    source = StepsSource(own_target())
    source.start()
    ring = RingWriter(role=Role.RANK, engine_id=9)
    now_ns = time.monotonic_ns()
    for step_id in range(1, 4_001):
        ring.write(RankStep(9, step_id, 0, 1, 1, now_ns - 1000, now_ns))
    source.look_again()
    got = ids(source.poll(now_ns))
    while source.behind:
        got += ids(source.poll(now_ns))
    assert got == list(range(1, 4_001))
    source.stop()
    ring.close()


def test_what_the_last_poll_leaves_is_counted(
    scheduler: RingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_RECORDS_A_POLL", 2)
    source = StepsSource(own_target())
    source.start()
    now_ns = time.monotonic_ns()
    for step_id in range(1, 6):
        scheduler.write(RankStep(9, step_id, 0, 1, 1, now_ns - 10, now_ns))
    assert ids(source.poll(now_ns)) == [1, 2]
    source.leave_unread()
    assert (source.status().dropped, source.uncounted_losses) == (3, 0)
    source.stop()


def test_a_ring_that_makes_no_sense_is_closed_for_good_and_told(
    scheduler: RingWriter, frontend: RingWriter
) -> None:
    source = StepsSource(own_target())
    source.start()
    now_ns = time.monotonic_ns()
    scheduler.write(RankStep(9, 1, 0, 1, 1, now_ns - 10, now_ns))
    assert ids(source.poll(now_ns)) == [1]
    memory = scheduler._memory
    assert memory is not None
    memory.words[layout.HEAD_AT // 8] = 2**64 - 1
    for _ in range(2):
        source.look_again()
        assert ids(source.poll(now_ns)) == []
        status = source.status()
        assert status.reason == "a ring is rejected as it makes no sense: its head went backwards"
        assert (status.dropped, source.uncounted_losses) == (0, 0)
        assert len(source._rings.open) == 1
    source.stop()


def test_rings_beyond_those_looked_at_are_told(
    monkeypatch: pytest.MonkeyPatch, scheduler: RingWriter, frontend: RingWriter
) -> None:
    monkeypatch.setattr(ring_set, "MAX_RINGS", 2)
    rings = RingSet()
    rings.look([os.getpid()], 0)
    assert rings.refusals() == "of one process, only 2 rings are looked at"
    rings.close()


def test_open_requests_know_their_oldest_and_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests, "MOST_OPEN", 4)
    requests = OpenRequests()
    assert requests.oldest_ns() is None
    for key, received_ns in ((1, 30), (2, 10), (3, 20)):
        assert requests.open(key, received_ns, key * 100) == []
    assert requests.oldest_ns() == 10
    requests.close(2)
    requests.close(99)
    assert requests.oldest_ns() == 20
    requests.open(4, 40, 400)
    requests.open(5, 50, 500)
    assert requests.open(6, 60, 600) == [3]
    assert (requests.trace_ids, list(requests.dropped_trace_ids)) == ([100, 400, 500, 600], [300])
    assert (len(requests), requests.given_up, requests.oldest_ns()) == (4, 1, 30)
    requests.close(6)
    for key in range(100, 200):  # one old request stays open, many come and go
        requests.open(key, key, key)
        requests.close(key)
    assert len(requests._oldest_first) <= 2 * open_requests.MOST_OPEN
    assert requests.forget_before(50) == [1, 4]
    assert (requests.trace_ids, list(requests.dropped_trace_ids)) == ([500], [300, 100, 400])
    assert requests.oldest_ns() == 50


def test_tallies_that_nobody_takes_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MOST_TALLIES", 10)
    ring = RingWriter(role=Role.RANK, engine_id=9, capacity_bytes=128 << 10)
    source = StepsSource(own_target())
    source.start()
    for number in range(13):
        now_ns = time.monotonic_ns()
        ring.write(Tally(9, 1, What.EXPERT_TOKENS, number, 0, now_ns - 1, now_ns, "", (1,)))
    source.poll(time.monotonic_ns())
    status = source.status()
    assert (status.dropped, source.uncounted_losses) == (3, 0)
    assert "3 tallies too many were given up" in status.reason
    assert [tally.index for tally in source.take_tallies()] == list(range(3, 13))
    source.stop()
    ring.close()


def test_what_a_writer_that_is_off_does_not_write_is_said() -> None:
    ring = RingWriter(role=Role.RANK, engine_id=9, capacity_bytes=128 << 10)
    source = StepsSource(own_target())
    source.start()
    while ring.is_on:
        ring.count_failure()
    ring.count_unwritten(2)
    status = source.status()
    assert status.state == "failed"
    assert status.reason.endswith(f": {ring.failures + 2} records were not written")
    source.stop()
    ring.close()
