"""Pieces of open intervals: each nanosecond once, whatever is polled when."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dsagent.agent.facts import FACT_DTYPE, Facts, Kind
from dsagent.agent.sources.bpf import layout
from dsagent.agent.sources.kernel_tables import open_threads, thread_sums
from dsagent.agent.sources.open_intervals import OpenIntervals

MS = 1_000_000
STOPPED, OFF = int(Kind.STOPPED), int(Kind.OFF_OTHER)


def _threads(kind: int, since_ns: int, *, woken_ns: int = 0, tid: int = 5) -> np.ndarray:
    threads = np.zeros(1, layout.THREAD)
    threads["since_state"] = since_ns << layout.STATE_BITS | kind
    threads["waking_ns"] = woken_ns
    threads["tid"] = tid
    threads["pid"] = 4
    return threads


def _ended(kind: int, start_ns: int, end_ns: int, tid: int = 5) -> Facts:
    fact = (kind, 1, 0, 1, 4, tid, 0, 0, 0, start_ns, end_ns, end_ns - start_ns)
    return np.array([fact], FACT_DTYPE)


@given(
    start=st.integers(1, 1 << 50),
    polls=st.lists(st.integers(0, 400 * MS), max_size=20),
    rest=st.integers(0, 300 * MS),
    kind=st.sampled_from([STOPPED, OFF]),
)
def test_pieces_and_the_rest_cover_the_interval_once(
    start: int, polls: list[int], rest: int, kind: int
) -> None:
    told = OpenIntervals()
    pieces = []
    now = start
    for gap in polls:
        now += gap
        told.age()
        found = open_threads(_threads(kind, start), told, now, step=3)
        pieces += found.tolist()
    end = now + rest
    pieces += told.trim(_ended(kind, start, end), [5]).tolist()
    spans = [(fact[-3], fact[-2]) for fact in pieces]
    assert sum(b - a for a, b in spans) == end - start
    if end > start:
        assert spans[0][0] == start
        assert spans[-1][1] == end
    for earlier, later in itertools.pairwise(spans):
        assert earlier[1] == later[0]
    assert all(fact[-1] == fact[-2] - fact[-3] for fact in pieces)


def test_a_short_wait_is_not_told_early() -> None:
    assert not len(open_threads(_threads(STOPPED, 100), OpenIntervals(), 100 + 49 * MS, step=0))


def test_sleeps_are_told_at_doubling_lengths() -> None:
    """A thread that idles for an hour makes a dozen pieces, not 36,000."""
    told, count = OpenIntervals(), 0
    for second in range(1, 3600):
        told.age()
        count += len(open_threads(_threads(OFF, 1), told, second * 1000 * MS, step=0))
    assert count < 20


def test_a_woken_thread_waits_for_a_cpu() -> None:
    threads = _threads(OFF, 100, woken_ns=1000)
    (piece,) = open_threads(threads, OpenIntervals(), 1000 + 60 * MS, step=9)
    assert piece["kind"] == Kind.RUNQUEUE
    assert piece["start_ns"] == 1000
    assert piece["step_id"] == 9


def test_an_interval_whose_end_was_lost_is_forgotten() -> None:
    told = OpenIntervals()
    open_threads(_threads(STOPPED, 1), told, 60 * MS, step=0)
    for _ in range(8):
        told.age()
    whole = _ended(STOPPED, 1, 90 * MS)
    assert told.trim(whole, [5])["start_ns"].tolist() == [1]


def test_what_was_told_beyond_the_end_is_not_told_again() -> None:
    told = OpenIntervals()
    open_threads(_threads(STOPPED, 1), told, 60 * MS, step=0)
    assert not len(told.trim(_ended(STOPPED, 1, 59 * MS), [5]))


def test_another_threads_interval_is_left_alone() -> None:
    told = OpenIntervals()
    open_threads(_threads(STOPPED, 1), told, 60 * MS, step=0)
    other = _ended(STOPPED, 1, 90 * MS, tid=6)
    assert told.trim(other, [6])["ns"].tolist() == [90 * MS - 1]


def test_only_the_generation_that_is_ours_is_read() -> None:
    threads = _threads(OFF, 1)
    for bank, generation in ((0, 4), (1, 5)):
        threads["sums"]["generation"][0, bank] = generation
        threads["sums"]["step"][0, bank] = 40 + generation
        threads["sums"]["kinds"]["count"][0, bank, OFF] = generation
        threads["sums"]["kinds"]["ns"][0, bank, OFF] = 100
    (fact,) = thread_sums(threads, 4)
    assert (fact["count"], fact["step_id"], fact["exact"], fact["kind"]) == (4, 44, 0, OFF)
    assert not len(thread_sums(threads, 6))


def test_one_interval_alone_is_exact() -> None:
    threads = _threads(OFF, 1)
    sums = threads["sums"]
    sums["generation"][0, 1] = 3
    for field, value in (("count", 1), ("ns", 50), ("start_ns", 100), ("end_ns", 150)):
        sums["kinds"][field][0, 1, OFF] = value
    (fact,) = thread_sums(threads, 3)
    assert fact["exact"] == 1
    assert fact["ns"] == fact["end_ns"] - fact["start_ns"]
