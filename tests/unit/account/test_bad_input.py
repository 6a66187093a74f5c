"""Whatever an engine, a kernel or a clock brings: nothing raises, parts are never negative and add
up to the nanosecond, and what is kept is bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from account_facts import fact, record, share, step
from account_facts import facts as make_facts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsagent.agent.attribution import accountant as accountant_module
from dsagent.agent.attribution.account import CAUSES, Account
from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.facts import Facts, Kind, Readings
from dsagent.agent.sources.plausible import plausible
from dsagent.instrumentation.records import Admission, Phase, RequestOpen, Share, Step

MS = 1_000_000
S = 1_000 * MS
HOUR = 3_600 * S
NOW = 100 * HOUR
FAR = NOW + 100 * HOUR
KEYS = st.integers(1, 5)
BOUNDED = ("batch.prefill_interference", "batch.not_scheduled", "queue.wait")

# Around one moment to the nanosecond, so that ends meet and overlap, and hours away from it.
MOMENTS = st.one_of(
    st.integers(NOW - 60, NOW),
    st.integers(NOW - 200 * MS, NOW),
    st.integers(NOW - 9 * S, NOW),
    st.sampled_from([0, NOW - HOUR, NOW - 30 * HOUR, NOW + S]),
)
SPANS = st.one_of(st.integers(0, 40), st.integers(0, 100 * MS), st.integers(0, 4 * S))
COUNTS = st.one_of(st.integers(0, 600), st.sampled_from([0, 1, (1 << 32) - 1]))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Ids that come twice and go back; phases that are longer than their step."""
    start = draw(MOMENTS)
    shares = st.builds(
        Share, KEYS, st.sampled_from(Phase), COUNTS, COUNTS, COUNTS, COUNTS, st.booleans()
    )
    made = step(
        draw(st.integers(0, 12)),
        start=start,
        end=start + draw(SPANS),
        schedule=draw(SPANS),
        prepare=draw(SPANS),
        forward=draw(SPANS),
        shares=tuple(draw(st.lists(shares, max_size=4))),
        admission=draw(st.sampled_from(Admission)),
    )
    return replace(made, engine_id=draw(st.integers(1, 2)), shares_omitted=draw(st.integers(0, 2)))


@st.composite
def closed(draw: st.DrawFn) -> Any:
    received = draw(MOMENTS)
    between = st.none() | MOMENTS
    return record(
        draw(KEYS),
        received=received,
        sent=received + draw(SPANS),
        tokenised_ns=draw(between),
        queued_ns=draw(between),
        first_scheduled_ns=draw(between),
        first_token_ns=draw(between),
        first_sent_ns=draw(between),
        finished_ns=draw(between),
        prompt_tokens=draw(st.none() | COUNTS),
        output_tokens=draw(COUNTS),
        finish_reason=draw(st.sampled_from([None, "stop", "length", "abort"])),
        error=draw(st.sampled_from([None, "timeout"])),
    )


@st.composite
def opened(draw: st.DrawFn) -> RequestOpen:
    key = draw(KEYS)
    return RequestOpen(key, f"req-{key}", key, key, None, None, draw(MOMENTS), 10, 20)


@st.composite
def kernel_facts(draw: st.DrawFn) -> Facts:
    """Out of order, from before the attach, with ends before their starts and counts that lie."""
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(MOMENTS)
        row = fact(
            draw(st.sampled_from(Kind)),
            start,
            start + draw(SPANS),
            tid=draw(st.sampled_from([11, 12, 20])),
            exact=draw(st.integers(0, 1)),
            ns=draw(st.none() | SPANS),
            step_id=draw(st.integers(0, 12)),
            culprit_pid=draw(st.sampled_from([0, 10, 500])),
            culprit_tid=draw(st.sampled_from([0, 11, 12, 501])),
        )
        if draw(st.integers(0, 9)) == 0:
            row = (*row[:-3], row[-2], row[-3], draw(st.sampled_from([-5, 0, 1 << 62])))
        rows.append(row)
    return make_facts(*rows)


@st.composite
def polls(draw: st.DrawFn) -> tuple[Readings, int]:
    """What one poll brings, and when it is taken to be."""
    readings = Readings(
        steps=[s for s in draw(st.lists(steps(), max_size=6)) if plausible(s, NOW)],
        opened=[o for o in draw(st.lists(opened(), max_size=3)) if plausible(o, NOW)],
        closed=[c for c in draw(st.lists(closed(), max_size=3)) if plausible(c, NOW)],
        forgotten=draw(st.lists(KEYS, max_size=1)),
        facts=draw(kernel_facts()),
        facts_complete_ns=draw(st.none() | MOMENTS),
        names=draw(st.dictionaries(st.integers(0, 30), st.just("x"), max_size=2)),
    )
    return readings, draw(MOMENTS)


def check(found: Account) -> None:
    for parts, rest_ns, whole_ns in (
        (found.parts, found.unattributed_ns, found.e2e_ns),
        (found.ttft_parts, found.ttft_unattributed_ns, found.record.ttft_ns),
    ):
        if whole_ns is None or whole_ns < 0:
            continue  # a record that says it sent before it received has no time to first token
        assert rest_ns is not None
        assert rest_ns >= 0
        assert all(part.ns > 0 and part.cause in CAUSES for part in parts)
        assert sum(part.ns for part in parts) + rest_ns == whole_ns
        for part in parts:
            assert all(culprit.ns > 0 for culprit in part.culprits)
    for cause in BOUNDED:
        part_ns = sum(part.ns for part in found.parts if part.cause == cause)
        assert sum(d.ns for d in found.delayed_by if d.cause == cause) == part_ns


# Drawing so much takes its time on a busy machine; that is no fault.
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(polls(), min_size=1, max_size=4), MOMENTS)
def test_garbage_in_accounts_that_add_up_out(
    brought: list[tuple[Readings, int]], attached_ns: int
) -> None:
    accountant = Accountant(attached_ns)
    accounts: list[Account] = []
    ended = 0
    for readings, now_ns in brought:
        accountant.add(readings)
        ended += len(readings.closed)
        accounts += accountant.due(now_ns)
        for unfinished in accountant.open_accounts(now_ns):
            check(unfinished)
        accountant.find("req-1", now_ns)
    accounts += accountant.due(FAR)
    assert len(accounts) == ended
    assert not accountant.waiting
    for found in accounts:
        check(found)


def test_a_step_that_names_a_request_twice_blames_it_twice() -> None:
    """The list of whom it waited for adds up, too."""
    accountant = Accountant(0)
    twice = (share(2, tokens=30), share(2, tokens=10), share(3))
    made = step(1, start=NOW, end=NOW + 48, forward=40, shares=twice)
    waits = record(1, received=NOW, sent=NOW + 48, queued_ns=NOW)
    accountant.add(Readings(steps=[made], closed=[waits]))
    (found,) = accountant.due(FAR)
    check(found)
    assert {d.cause for d in found.delayed_by} == {"queue.wait"}


def test_facts_whose_times_cannot_be_are_dropped_and_counted() -> None:
    good = fact(Kind.RUNQUEUE, NOW - 50, NOW - 40, tid=11)
    backwards = (*good[:-3], NOW - 40, NOW - 50, 10)
    negative = (*good[:-1], -10)
    accountant = Accountant(0)
    accountant.add(Readings(facts=make_facts(good, backwards, negative)))
    assert accountant.given_up == 2


@pytest.mark.parametrize("jump_ns", [-3 * HOUR, 3 * HOUR])
def test_a_clock_that_jumps_by_hours_loses_no_request(jump_ns: int) -> None:
    """The engine's times jump between two steps, with a request on either side and one across."""
    accountant = Accountant(0)
    shares = tuple(share(key) for key in (1, 2, 3))
    accounts = []
    for number, at in enumerate((NOW, NOW + 20, NOW + jump_ns, NOW + jump_ns + 20), 1):
        made = step(number, start=at, end=at + 15, forward=10, shares=shares)
        accountant.add(Readings(steps=[made], facts_complete_ns=at + 15))
        accounts += accountant.due(at + 15)
    low, high = sorted((NOW, NOW + jump_ns))
    lives = {1: (NOW, NOW + 35), 2: (low, high + 35), 3: (NOW + jump_ns, NOW + jump_ns + 35)}
    accountant.add(
        Readings(
            closed=[
                record(key, received=start, sent=end, queued_ns=start, finished_ns=end)
                for key, (start, end) in lives.items()
            ]
        )
    )
    accounts += accountant.due(FAR)
    assert sorted(found.record.request_key for found in accounts) == [1, 2, 3]
    for found in accounts:
        check(found)


def test_requests_that_never_end_hold_no_more_than_the_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """10,000 come and none ends, while the engine goes on: steps and facts leave at their caps,
    and whoever asks gets the oldest few at once."""
    monkeypatch.setattr(accountant_module, "MOST_OPEN", 6_000)
    monkeypatch.setattr(accountant_module, "MOST_SHARES", 500)
    monkeypatch.setattr(accountant_module, "MOST_FACTS", 300)
    accountant = Accountant(0)
    for number in range(1, 201):
        at = number * 20 * MS
        first = number * 50
        came = [
            RequestOpen(key, f"req-{key}", key, key, None, None, at, 10, 20)
            for key in range(first, first + 50)
        ]
        shares = tuple(share(first + i) for i in range(8))
        made = step(number, start=at, end=at + 19 * MS, forward=15 * MS, shares=shares)
        seen = make_facts(*(fact(Kind.RUNQUEUE, at + i, at + i + 9, tid=11) for i in range(5)))
        accountant.add(
            Readings(steps=[made], opened=came, facts=seen, facts_complete_ns=at + 20 * MS)
        )
        assert accountant.due(at + 20 * MS) == []
    assert accountant.find("req-10049", 201 * 20 * MS) is not None
    assert accountant.find("req-50", 201 * 20 * MS) is None  # given up as one of too many
    assert accountant.given_up >= 4_000 + 1_000 - 300
    unfinished = accountant.open_accounts(201 * 20 * MS)
    assert len(unfinished) == accountant_module.MOST_UNFINISHED
    for found in unfinished:
        check(found)


def test_no_call_does_more_than_its_share_and_none_is_forgotten() -> None:
    """Three hundred requests that were all in each of a hundred steps end at once."""
    keys = range(1, 301)
    batch = tuple(share(key) for key in keys)
    made = [
        step(i, start=i * 10 * MS, end=(i + 1) * 10 * MS, forward=9 * MS, shares=batch)
        for i in range(100)
    ]
    ends = S + MS
    ended = [
        replace(
            record(key, received=0, sent=ends),
            queued_ns=0,
            first_scheduled_ns=0,
            first_token_ns=10 * MS,
            first_sent_ns=10 * MS,
            finished_ns=S,
            output_tokens=100,
        )
        for key in keys
    ]
    accountant = Accountant(0)
    accountant.add(Readings(steps=made, closed=ended, facts_complete_ns=FAR))
    calls = [len(accountant.due(ends))]
    assert 0 < calls[0] < len(keys) / 10
    assert accountant.waiting == len(keys) - calls[0]
    while accountant.waiting:
        calls.append(len(accountant.due(ends)))
        assert calls[-1]
    assert sum(calls) == len(keys)
