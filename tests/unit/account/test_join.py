"""The join: pieces, precedence, barriers, capacity."""

from __future__ import annotations

import pytest
from account_facts import fact, facts, share, step
from hypothesis import given
from hypothesis import strategies as st

from dsagent.agent.attribution import pieces
from dsagent.agent.attribution.capacity import blame_by_capacity, occupied
from dsagent.agent.attribution.fact_store import FactIndex, FactRows
from dsagent.agent.attribution.join import Joiner, Watched
from dsagent.agent.attribution.model import Price
from dsagent.agent.attribution.pieces import Piece, cut, split
from dsagent.agent.facts import Facts, Kind


def join_piece(piece: Piece, found: Facts, watched: Watched) -> Piece:
    return Joiner(found, watched).join(piece)


MS = 1_000_000
WATCHED = Watched(pid=10, loop_tid=11, gang=frozenset({11, 12}))


def test_sections_cover_the_piece_without_holes() -> None:
    piece = cut(step(2, start=110, end=200, schedule=5, prepare=5, forward=60), 100)
    bounds = [(s.kind, s.start_ns, s.end_ns) for s in piece.sections]
    assert bounds == [
        ("gap", 100, 110),
        ("host", 110, 120),
        ("forward", 120, 180),
        ("host", 180, 200),
    ]


def test_overlapping_steps_belong_to_the_earlier_output_first() -> None:
    piece = cut(step(2, start=50, end=200, schedule=5, prepare=5, forward=120), 100)
    assert piece.start_ns == 100
    assert [(s.kind, s.start_ns, s.end_ns) for s in piece.sections] == [
        ("forward", 100, 180),
        ("host", 180, 200),
    ]


def test_each_nanosecond_is_laid_once_by_precedence() -> None:
    piece = cut(step(1, start=0, end=100, forward=100), 0)
    joined = join_piece(
        piece,
        facts(
            fact(Kind.RUNQUEUE, 10, 40, tid=11),
            fact(Kind.RUNQUEUE, 30, 50, tid=12),  # another thread of the gang: a union
            fact(Kind.STOPPED, 20, 35, tid=11),  # a stop goes before
            fact(Kind.RUNQUEUE, 60, 90, tid=99),  # not one of ours
        ),
        WATCHED,
    )
    assert {d.cause: d.ns for s in joined.sections for d in s.delays} == {
        "process.stopped": 15,
        "cpu.runqueue": 25,
    }


def test_a_futex_ended_by_a_team_mate_is_a_barrier_not_a_lock() -> None:
    piece = cut(step(1, start=0, end=100, forward=100), 0)
    joined = join_piece(
        piece,
        facts(
            fact(Kind.OFF_FUTEX, 10, 40, tid=11, culprit_tid=12),
            fact(Kind.OFF_FUTEX, 50, 60, tid=11, culprit_pid=10, culprit_tid=77),
        ),
        WATCHED,
    )
    (delay,) = joined.sections[0].delays
    assert (delay.cause, delay.ns) == ("lock.wait", 10)
    assert [(b.pid, b.tid, b.ns) for b in delay.blames] == [(10, 77, 10)]


def test_outside_forward_only_the_loop_counts() -> None:
    piece = cut(step(1, start=0, end=100, schedule=100, forward=0), 0)
    joined = join_piece(piece, facts(fact(Kind.RUNQUEUE, 10, 40, tid=12)), WATCHED)
    assert not joined.sections[0].delays


def test_short_delays_count_once_per_step_as_the_worst_thread() -> None:
    piece = cut(step(7, start=0, end=100, forward=100), 0)
    joined = join_piece(
        piece,
        facts(
            fact(Kind.RUNQUEUE, 0, 90, tid=11, ns=8, exact=0, step_id=7),
            fact(Kind.RUNQUEUE, 0, 90, tid=12, ns=5, exact=0, step_id=7),
        ),
        WATCHED,
    )
    assert [(d.cause, d.ns) for d in joined.sections[0].delays] == [("cpu.runqueue", 8)]


def test_forward_is_charged_no_more_than_its_excess_but_stops_whole() -> None:
    piece = join_piece(
        cut(step(1, start=0, end=100, forward=100), 0),
        facts(fact(Kind.RUNQUEUE, 0, 60, tid=12), fact(Kind.STOPPED, 60, 90, tid=11)),
        WATCHED,
    )
    bounded = Joiner(facts(), WATCHED).priced(piece, Price(50, 50, 0, 1, 0, 0.0, True))
    assert {d.cause: d.ns for d in bounded.sections[0].delays} == {
        "process.stopped": 30,
        "cpu.runqueue": 20,
    }


def test_the_cpu_was_taken_by_who_occupied_it_in_proportion() -> None:
    # begin, end, pid, ns
    found = occupied([(0, 100, 500, 60), (0, 100, 600, 20)], 0, 100)
    assert [(b.pid, b.ns) for b in blame_by_capacity(found, 40, 10)] == [
        (500, 30),
        (600, 10),
    ]
    # What nobody else occupied, the target's own threads did.
    assert [(b.pid, b.ns) for b in blame_by_capacity(found, 90, 10)] == [
        (500, 60),
        (600, 20),
        (10, 10),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 300)), min_size=0, max_size=60),
    st.integers(0, 1100),
    st.integers(0, 300),
)
def test_the_index_finds_what_a_full_look_finds(
    spans: list[tuple[int, int]], start: int, length: int
) -> None:
    found = facts(*(fact(Kind.RUNQUEUE, s, s + n, tid=11) for s, n in spans))
    index = FactIndex(found)
    near = index.overlapping(start, start + length)
    naive = [(s, s + n) for s, n in spans if s + n > start and s < start + length]
    mine = [(s, e) for s, e in near[["start_ns", "end_ns"]].tolist() if e > start]
    assert sorted(mine) == sorted(naive)
    rows = FactRows(found, ["tid"]).overlapping(start, start + length)
    assert rows == [(s, e, 11) for s, e in mine]


@given(
    st.integers(0, 10**18),
    st.lists(st.floats(0, 1e12, allow_nan=False), min_size=1, max_size=20),
)
def test_split_adds_up(total: int, weights: list[float]) -> None:
    parts = split(total, weights)
    assert sum(parts) == (total if sum(weights) > 0 else 0)
    assert all(part >= 0 for part in parts)


@given(st.integers(0, 10**10), st.lists(st.integers(0, 40_000), min_size=48, max_size=100))
def test_many_are_split_as_few_are(total: int, weights: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_MANY", len(weights) + 1)
        one_by_one = split(total, weights)
    assert split(total, weights) == one_by_one


def test_a_share_is_at_most_one_off_its_exact_value() -> None:
    assert split(10, [1, 1, 1]) == [4, 3, 3]
    assert split(0, [1, 2]) == [0, 0]
    assert split(7, [0, 0]) == [0, 0]


def test_facts_and_steps_of_the_helpers_are_well_formed() -> None:
    assert share(1).request_key == 1
    with pytest.raises(ValueError, match="end"):
        fact(Kind.RUNQUEUE, 10, 5, tid=1)


def test_a_busy_sibling_slows_but_only_as_far_as_it_can() -> None:
    price = Price(50, 50, 0, 1, 0, 0.1, True)
    piece = cut(step(1, start=0, end=100, forward=100), 0)
    beside = fact(Kind.FOREIGN, 0, 100, tid=0, culprit_pid=500, ns=60, exact=0)
    joiner = Joiner(facts(beside), WATCHED)
    (delay,) = joiner.priced(joiner.join(piece), price).sections[0].delays
    # 45 beyond prediction and band; 60 busy beside it can explain half of that.
    assert (delay.cause, delay.ns) == ("cpu.slowed", 30)
    assert [(b.pid, b.ns) for b in delay.blames] == [(500, 30)]


def test_what_took_the_cpu_did_not_also_run_beside_it() -> None:
    price = Price(50, 50, 0, 1, 0, 0.1, True)
    piece = cut(step(1, start=0, end=100, forward=100), 0)
    found = facts(
        fact(Kind.RUNQUEUE, 0, 30, tid=11),
        fact(Kind.FOREIGN, 0, 100, tid=0, culprit_pid=500, ns=32, exact=0),
    )
    joiner = Joiner(found, WATCHED)
    delays = joiner.priced(joiner.join(piece), price).sections[0].delays
    assert [(d.cause, d.ns) for d in delays] == [("cpu.runqueue", 30)]


def test_a_step_of_the_usual_length_was_not_slowed_by_anybody() -> None:
    price = Price(95, 95, 0, 1, 0, 0.1, True)
    piece = cut(step(1, start=0, end=100, forward=100), 0)
    busy = facts(fact(Kind.FOREIGN, 0, 100, tid=0, culprit_pid=500, ns=100, exact=0))
    joiner = Joiner(busy, WATCHED)
    assert not joiner.priced(joiner.join(piece), price).sections[0].delays


def test_a_lock_that_went_through_many_hands_is_blamed_on_who_held_it() -> None:
    piece = cut(step(1, start=0, end=1000 * MS, schedule=1000 * MS, forward=0), 0)
    joined = join_piece(
        piece,
        facts(
            fact(Kind.OFF_FUTEX, 0, 500 * MS, tid=11, culprit_pid=10, culprit_tid=20),
            # The front end only passed it on: it had waited for the same thread.
            fact(Kind.OFF_FUTEX, 10 * MS, 480 * MS, tid=20, culprit_pid=10, culprit_tid=77),
            fact(Kind.OFF_FUTEX, 0, 20 * MS, tid=77, culprit_pid=10, culprit_tid=11),
        ),
        WATCHED,
    )
    (delay,) = joined.sections[0].delays
    assert [(b.tid, b.ns) for b in delay.blames] == [(77, 500 * MS)]


def test_two_that_wait_for_one_another_end_the_search() -> None:
    piece = cut(step(1, start=0, end=1000 * MS, schedule=1000 * MS, forward=0), 0)
    joined = join_piece(
        piece,
        facts(
            fact(Kind.OFF_FUTEX, 0, 500 * MS, tid=11, culprit_pid=10, culprit_tid=20),
            fact(Kind.OFF_FUTEX, 0, 500 * MS, tid=20, culprit_pid=10, culprit_tid=11),
        ),
        WATCHED,
    )
    assert joined.sections[0].delayed_ns == 500 * MS


def test_a_row_of_timed_out_sleeps_is_blamed_on_who_ended_the_last() -> None:
    """Waiting for the interpreter's lock is sleeping 5 ms at a time: only the last sleep is ended
    by somebody, here by one that had only waited in the same way."""
    piece = cut(step(1, start=0, end=100 * MS, schedule=100 * MS, forward=0), 0)

    def row(tid: int, until_ms: int, culprit_tid: int) -> list[tuple[int, ...]]:
        starts = range(0, until_ms, 5)
        return [
            fact(
                Kind.OFF_FUTEX,
                at * MS,
                at * MS + 4_900_000,
                tid=tid,
                culprit_pid=10 if at == starts[-1] else 0,
                culprit_tid=culprit_tid if at == starts[-1] else 0,
            )
            for at in starts
        ]

    joined = join_piece(piece, facts(*row(11, 60, 20), *row(20, 60, 77)), WATCHED)
    (delay,) = joined.sections[0].delays
    assert delay.ns == 12 * 4_900_000
    assert [(b.tid, b.ns) for b in delay.blames] == [(77, delay.ns)]


def test_a_wait_that_only_timed_out_is_nobodys_doing() -> None:
    piece = cut(step(1, start=0, end=100 * MS, schedule=100 * MS, forward=0), 0)
    sleep = fact(Kind.OFF_FUTEX, 0, 5 * MS, tid=11)
    later = fact(Kind.OFF_FUTEX, 50 * MS, 60 * MS, tid=11, culprit_pid=10, culprit_tid=20)
    joined = join_piece(piece, facts(sleep, later), WATCHED)
    (delay,) = joined.sections[0].delays
    assert [(b.tid, b.ns) for b in delay.blames] == [(20, 10 * MS)]
