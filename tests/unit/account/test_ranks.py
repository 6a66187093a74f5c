"""An engine whose forward pass runs in other processes: hand-overs, the slowest rank, its gang."""

from __future__ import annotations

from dataclasses import replace

from account_facts import fact, facts, record, share, step

from dsagent.agent.attribution.account import Account
from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.attribution.join import Joiner, Watched, gang_shares
from dsagent.agent.attribution.pieces import cut
from dsagent.agent.facts import Kind, Readings
from dsagent.instrumentation.records import RankStep, RequestRecord, Step

MS = 1_000_000
SCHEDULER, FIRST, SECOND = 10, 30, 40  # pids; a fact's pid is 10 unless changed
WATCHED = Watched(SCHEDULER, 11, frozenset({31, 32, 41}), frozenset({31, 41}))


def rank(number: int, start: int, end: int, step_id: int = 1) -> RankStep:
    pid = (FIRST, SECOND)[number]
    return RankStep(1, step_id, number, pid, pid + 1, start, end)


def of(pid: int, row: tuple[int, ...]) -> tuple[int, ...]:
    return (*row[:4], pid, *row[5:])


def test_the_slowest_rank_is_the_forward_pass_between_two_hand_overs() -> None:
    whole = step(1, start=0, end=100, schedule=10, forward=80)
    piece = cut(whole, 0, ranks=[rank(1, 14, 80), rank(0, 12, 60)])
    assert piece.rank is not None and piece.rank.rank == 1
    assert [(s.kind, s.start_ns, s.end_ns) for s in piece.sections] == [
        ("host", 0, 10),
        ("hand-over", 10, 14),
        ("forward", 14, 60),
        ("slowest", 60, 80),
        ("hand-over", 80, 90),
        ("host", 90, 100),
    ]


def test_ranks_out_of_the_step_leave_no_hole() -> None:
    whole = step(1, start=0, end=100, schedule=10, forward=80)
    for ranks in ([rank(0, -50, 500)], [rank(0, 95, 97)], [rank(0, 5, 6), rank(1, 300, 400)]):
        piece = cut(whole, 0, ranks=ranks)
        assert sum(section.ns for section in piece.sections) == 100


def test_only_who_executes_is_watched_and_in_a_hand_over_both_ends() -> None:
    whole = step(1, start=0, end=100 * MS, forward=100 * MS)
    piece = cut(whole, 0, ranks=[rank(0, 10 * MS, 90 * MS)])
    found = facts(
        of(FIRST, fact(Kind.RUNQUEUE, 2 * MS, 5 * MS, tid=31)),  # is to take the step over
        of(FIRST, fact(Kind.RUNQUEUE, 20 * MS, 30 * MS, tid=32)),
        of(SECOND, fact(Kind.RUNQUEUE, 40 * MS, 50 * MS, tid=41)),  # another rank's
        fact(Kind.RUNQUEUE, 60 * MS, 70 * MS, tid=11),  # the scheduler only waits
    )
    joined = Joiner(found, WATCHED).join(piece)
    assert [(s.kind, s.delayed_ns) for s in joined.sections] == [
        ("hand-over", 3 * MS),
        ("forward", 10 * MS),
        ("hand-over", 0),
    ]


def test_what_others_lost_in_small_pieces_did_not_make_the_slowest_rank_slower() -> None:
    """They have no place in the step, and are summed by thread: they must be its own."""
    whole = step(1, start=0, end=100 * MS, forward=100 * MS)
    piece = cut(whole, 0, ranks=[rank(0, 10 * MS, 90 * MS), rank(1, 10 * MS, 50 * MS)])

    def short(pid: int, tid: int, ns: int) -> tuple[int, ...]:
        row = fact(Kind.RUNQUEUE, 10 * MS, 90 * MS, tid=tid, step_id=1, ns=ns, exact=0)
        return of(pid, row)

    found = facts(short(FIRST, 31, MS), short(SECOND, 41, 9 * MS), short(SCHEDULER, 11, 5 * MS))
    joined = Joiner(found, WATCHED).join(piece)
    assert {s.kind: s.delayed_ns for s in joined.sections if s.delayed_ns} == {"forward": MS}


def test_the_gang_is_of_the_rank_that_executes() -> None:
    """A scheduler that spins while it waits for its workers computes nothing."""
    piece = cut(step(1, start=0, end=100, forward=100), 0, ranks=[rank(0, 10, 90)])
    found = facts(
        fact(Kind.ONCPU, 0, 100, tid=11, step_id=1),
        of(FIRST, fact(Kind.ONCPU, 10, 90, tid=31, step_id=1)),
    )
    assert gang_shares(found, {1: piece}) == {1: {31: 1.0}}


def account(
    the_record: RequestRecord, steps: list[Step], ranks: list[RankStep], *rows: tuple[int, ...]
) -> Account:
    accountant = Accountant(0)
    accountant.add(
        Readings(
            steps=steps,
            rank_steps=ranks,
            closed=[the_record],
            facts=facts(*rows),
            facts_complete_ns=10**15,
            names={SECOND: "worker"},
        )
    )
    # No later step comes, and patience is not asked for.
    (found,) = accountant.due(the_record.sent_ns)
    return found


def request(sent: int, finished: int) -> RequestRecord:
    return replace(
        record(1, received=0, sent=sent),
        queued_ns=5 * MS,
        first_scheduled_ns=5 * MS,
        first_token_ns=100 * MS,
        first_sent_ns=sent,
        finished_ns=finished,
        output_tokens=1,
    )


def test_who_waits_for_the_slowest_rank_is_told_which() -> None:
    whole = step(1, start=5 * MS, end=100 * MS, forward=95 * MS, shares=(share(1),))
    found = account(
        request(110 * MS, 108 * MS),
        [whole],
        [rank(0, 10 * MS, 50 * MS), rank(1, 10 * MS, 90 * MS)],
    )
    waited = next(part for part in found.parts if part.cause == "rank.wait")
    assert (waited.ns, waited.how) == (40 * MS, "measured")
    assert [(c.name, c.pid, c.ns) for c in waited.culprits] == [("worker", SECOND, 40 * MS)]


def test_one_engine_that_is_ahead_says_nothing_of_anothers_steps() -> None:
    """With data parallelism the rings of two schedulers are read one after the other."""
    mine = [
        step(n, start=start * MS, end=end * MS, forward=(end - start) * MS, shares=(share(1),))
        for n, start, end in ((1, 5, 50), (2, 50, 100))
    ]
    ahead = replace(step(1, start=0, end=200 * MS, forward=200 * MS), engine_id=2)
    ended = replace(request(110 * MS, 100 * MS), output_tokens=2)
    accountant = Accountant(0)
    accountant.add(Readings(steps=[ahead, mine[0]], closed=[ended], facts_complete_ns=10**15))
    assert accountant.due(ended.sent_ns) == []
    accountant.add(Readings(steps=[mine[1]], facts_complete_ns=10**15))
    (found,) = accountant.due(ended.sent_ns)
    assert "unobserved" not in {part.cause for part in found.parts}


def test_the_front_end_learns_late_that_a_request_is_done() -> None:
    """What lies between the last output and its arrival there is the way out, not the engine's."""
    whole = step(1, start=5 * MS, end=100 * MS, forward=95 * MS, shares=(share(1),))
    found = account(request(110 * MS, 108 * MS), [whole], [rank(0, 5 * MS, 100 * MS)])
    told = {part.cause: part.ns for part in found.parts}
    assert told["frontend.out"] == 10 * MS
    assert sum(told.values()) + found.unattributed_ns == 110 * MS
