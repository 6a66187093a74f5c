"""Attribution: parts add up, culprits are right, nothing is claimed beyond its evidence."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from account_facts import fact, record, share, step
from account_facts import facts as make_facts
from hypothesis import given, settings
from hypothesis import strategies as st

from dsagent.agent.attribution.account import CAUSES, Account
from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.attribution.model import shape
from dsagent.agent.facts import Kind, Readings
from dsagent.instrumentation.records import (
    Admission,
    Phase,
    RequestOpen,
    RequestRecord,
    Step,
)

MS = 1_000_000
PREFILL = Phase.PREFILL


def account(
    the_record: RequestRecord,
    steps: list[Step],
    *rows: tuple[int, ...],
    attached: int = 0,
    names: dict[int, str] | None = None,
    others: tuple[RequestRecord, ...] = (),
) -> Account:
    accountant = Accountant(attached)
    accountant.add(
        Readings(
            steps=steps,
            closed=[*others, the_record],
            facts=make_facts(*rows),
            facts_complete_ns=10**15,
            names=names or {},
        )
    )
    accounts = accountant.due(10**15)
    return next(a for a in accounts if a.record.request_key == the_record.request_key)


def parts(found: Account) -> dict[str, int]:
    return {part.cause: part.ns for part in found.parts}


def check_sums(found: Account) -> None:
    assert sum(p.ns for p in found.parts) + found.unattributed_ns == found.e2e_ns
    assert all(p.ns > 0 and p.cause in CAUSES for p in found.parts)
    assert found.unattributed_ns >= 0
    if found.record.ttft_ns is not None:
        assert found.ttft_unattributed_ns is not None
        total = sum(p.ns for p in found.ttft_parts) + found.ttft_unattributed_ns
        assert total == found.record.ttft_ns
    for cause in ("batch.prefill_interference", "batch.not_scheduled", "queue.wait"):
        blamed = sum(d.ns for d in found.delayed_by if d.cause == cause)
        assert blamed == parts(found).get(cause, 0)


def life(
    key: int, received: int, queued: int, first: int, finished: int, sent: int
) -> RequestRecord:
    return record(
        key,
        received=received,
        sent=sent,
        tokenised_ns=queued,
        queued_ns=queued,
        first_scheduled_ns=queued,
        first_token_ns=first,
        first_sent_ns=first + 1,
        finished_ns=finished,
    )


def test_a_plain_request() -> None:
    steps = [
        step(1, start=20, end=100, forward=60, schedule=10, shares=(share(1, PREFILL, 5),)),
        step(2, start=110, end=200, forward=80, schedule=5, shares=(share(1),)),
    ]
    found = account(life(1, 0, 15, 100, 200, 210), steps)
    check_sums(found)
    assert parts(found) == {
        "frontend.in": 15,
        "engine.gap": 5 + 10,
        "engine.host": 20 + 10,
        "prefill.compute": 60,
        "decode.compute": 80,
        "frontend.out": 10,
    }
    assert found.step_ids == (1, 2)


def test_a_refused_request_never_left_the_front_end() -> None:
    found = account(record(1, received=0, sent=50, error="invalid_request"), [])
    check_sums(found)
    assert parts(found) == {"frontend.in": 50}


def test_what_lies_before_the_attach_is_unobserved() -> None:
    steps = [step(9, start=120, end=200, forward=80, shares=(share(1),))]
    found = account(life(1, 0, 15, 200, 200, 210), steps, attached=100)
    check_sums(found)
    assert found.partial
    assert parts(found)["unobserved"] == 100


def test_waiting_is_charged_by_the_reason_the_scheduler_gave() -> None:
    long_one = share(7, PREFILL, 512)
    steps = [
        step(1, start=0, end=100, forward=100, shares=(long_one,)),
        step(2, start=100, end=200, forward=100, shares=(long_one,), admission=Admission.NO_BUDGET),
        step(3, start=200, end=300, forward=100, shares=(long_one,), admission=Admission.NO_PLACE),
        step(
            4, start=300, end=400, forward=100, shares=(long_one,), admission=Admission.NO_KV_BLOCKS
        ),
        step(5, start=400, end=500, forward=100, shares=(share(1, PREFILL, 5),)),
    ]
    other = life(7, 0, 0, 500, 500, 510)
    found = account(life(1, 40, 50, 500, 500, 500), steps, others=(other,))
    check_sums(found)
    assert parts(found) == {
        "frontend.in": 10,
        "queue.wait": 50 + 100,
        "batch.not_scheduled": 100,
        "queue.kv_blocks": 100,
        "prefill.compute": 100,
    }
    assert {(d.cause, d.request_id) for d in found.delayed_by} == {
        ("queue.wait", "req-7"),
        ("batch.not_scheduled", "req-7"),
    }


def test_left_out_of_a_step_after_admission_and_preempted() -> None:
    steps = [
        step(1, start=0, end=100, forward=100, shares=(share(1, PREFILL, 5),)),
        step(2, start=100, end=200, forward=100, shares=(share(7, PREFILL, 500),)),
        step(3, start=200, end=300, forward=100, shares=(share(1),)),
        step(4, start=300, end=400, forward=100, shares=(share(7),)),
        step(5, start=400, end=500, forward=100, shares=(share(1, PREFILL, 6, recompute=True),)),
    ]
    found = account(life(1, 0, 0, 100, 500, 500), steps)
    check_sums(found)
    assert parts(found)["batch.not_scheduled"] == 100
    assert parts(found)["preempted"] == 200


def learnt(accountant: Accountant, first_id: int = 1) -> tuple[int, int]:
    """300 clean steps: a decode takes 10 ms, each more 1 ms, each prefill token 1 ms."""
    dice = random.Random(1)
    at = 0
    steps = []
    for i in range(300):
        decodes = dice.randint(1, 8)
        prefill = dice.choice([0, 0, 0, 16, 64, 200])
        shares = tuple(share(1000 + j) for j in range(decodes))
        if prefill:
            shares += (share(2000 + i, PREFILL, prefill, context=0),)
        forward = (9 + decodes + prefill) * MS
        steps.append(step(first_id + i, start=at, end=at + forward, forward=forward, shares=shares))
        at += forward
    accountant.add(Readings(steps=steps, facts_complete_ns=10**15))
    accountant.due(at)
    return first_id + 300, at


def test_a_long_prefill_in_the_batch_is_interference_by_that_request() -> None:
    accountant = Accountant(0)
    step_id, at = learnt(accountant)
    mixed = step(
        step_id,
        start=at,
        end=at + 212 * MS,
        forward=212 * MS,
        shares=(share(1), share(2), share(3), share(7, PREFILL, 200, context=0)),
    )
    victim = life(1, at, at, mixed.end_ns, mixed.end_ns, mixed.end_ns)
    culprit = life(7, at, at, mixed.end_ns, mixed.end_ns, mixed.end_ns + 5)
    accountant.add(Readings(steps=[mixed], closed=[culprit, victim], facts_complete_ns=10**15))
    found = next(a for a in accountant.due(10**15) if a.record.request_key == 1)
    check_sums(found)
    top = found.top
    assert top is not None
    assert top.cause == "batch.prefill_interference"
    assert top.how == "modelled"
    assert abs(top.ns - 200 * MS) < 20 * MS
    assert [c.request_id for c in top.culprits] == ["req-7"]
    assert abs(parts(found)["decode.compute"] - 10 * MS) < 3 * MS
    assert found.unattributed_ns < 10 * MS


def test_excess_without_evidence_stays_unattributed_and_with_it_is_named() -> None:
    for with_evidence in (False, True):
        accountant = Accountant(0)
        step_id, at = learnt(accountant)
        slow = step(step_id, start=at, end=at + 110 * MS, forward=110 * MS, shares=(share(1),))
        rows = [
            fact(Kind.ONCPU, at, at + 110 * MS, tid=11, ns=100 * MS, exact=0, step_id=step_id),
        ]
        if with_evidence:
            rows += [
                fact(Kind.RUNQUEUE, at + MS, at + 100 * MS, tid=11),
                fact(Kind.FOREIGN, at, at + 110 * MS, tid=0, culprit_pid=500, ns=105 * MS, exact=0),
            ]
        accountant.add(
            Readings(
                steps=[slow],
                closed=[life(1, at, at, slow.end_ns, slow.end_ns, slow.end_ns)],
                facts=make_facts(*rows),
                facts_complete_ns=10**15,
                names={500: "stress-ng"},
            )
        )
        (found,) = accountant.due(10**15)
        check_sums(found)
        if with_evidence:
            assert found.top is not None
            assert found.top.cause == "cpu.runqueue"
            assert found.top.how == "measured"
            assert [(c.kind, c.name, c.pid) for c in found.top.culprits] == [
                ("process", "stress-ng", 500)
            ]
        else:
            assert "cpu.runqueue" not in parts(found)
            assert found.unattributed_ns > 90 * MS


def test_a_stop_while_queued_is_the_stop() -> None:
    steps = [
        step(1, start=0, end=400 * MS, forward=400 * MS, shares=(share(7),)),
        step(2, start=400 * MS, end=440 * MS, forward=40 * MS, shares=(share(1, PREFILL, 5),)),
    ]
    found = account(
        life(1, 10 * MS, 11 * MS, 440 * MS, 440 * MS, 440 * MS),
        steps,
        fact(Kind.STOPPED, 50 * MS, 350 * MS, tid=11),
    )
    check_sums(found)
    assert parts(found)["process.stopped"] == 300 * MS


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_whatever_comes_the_parts_add_up(seed: int) -> None:
    """Random engines, random facts, random attach times, records that contradict the steps."""
    dice = random.Random(seed)
    accountant = Accountant(dice.randint(0, 300))
    at = 0
    steps = []
    for i in range(1, dice.randint(2, 25)):
        if dice.random() < 0.1:
            continue  # a lost step
        start = at + dice.randint(0, 20) - (5 if dice.random() < 0.1 else 0)
        spent = [dice.randint(0, 10), dice.randint(0, 5), dice.randint(0, 50)]
        at = max(start, 0) + sum(spent) + dice.randint(0, 10)
        shares = tuple(
            share(
                key,
                dice.choice([PREFILL, Phase.DECODE]),
                dice.randint(1, 600),
                dice.randint(0, 900),
                dice.randint(0, 2),
                dice.random() < 0.1,
            )
            for key in dice.sample(range(1, 6), dice.randint(0, 5))
        )
        steps.append(
            step(
                i,
                start=max(start, 0),
                end=at,
                schedule=spent[0],
                prepare=spent[1],
                forward=spent[2],
                shares=shares,
                admission=dice.choice(list(Admission)),
            )
        )
    rows = []
    for _ in range(dice.randint(0, 40)):
        start = dice.randint(0, at + 10)
        rows.append(
            fact(
                dice.choice(list(Kind)),
                start,
                start + dice.randint(1, 80),
                tid=dice.choice([11, 12, 20]),
                exact=dice.randint(0, 1),
                step_id=dice.randint(0, 25),
                culprit_pid=dice.choice([0, 10, 500]),
                culprit_tid=dice.choice([0, 12, 77]),
            )
        )
    closed = []
    for key in range(1, 6):
        received = dice.randint(0, at)
        times = sorted(dice.randint(received, at + 50) for _ in range(5))
        closed.append(
            record(
                key,
                received=received,
                sent=times[4],
                queued_ns=dice.choice([None, times[0]]),
                first_scheduled_ns=dice.choice([None, times[1]]),
                first_token_ns=dice.choice([None, times[1]]),
                first_sent_ns=dice.choice([None, times[2]]),
                finished_ns=dice.choice([None, times[3]]),
            )
        )
    accountant.add(
        Readings(steps=steps, closed=closed, facts=make_facts(*rows), facts_complete_ns=10**15)
    )
    accounts = accountant.due(10**15)
    assert len(accounts) == 5
    for found in accounts:
        check_sums(found)


def opened(key: int, received: int) -> RequestOpen:
    return RequestOpen(key, f"req-{key}", key, key, None, None, received, 10, 20)


def decodes(count: int, *keys: int, length: int = 20 * MS, first_id: int = 1) -> list[Step]:
    shares = tuple(share(key) for key in keys)
    return [
        step(first_id + i, start=i * length, end=(i + 1) * length, forward=length, shares=shares)
        for i in range(count)
    ]


def test_a_client_that_leaves_a_hanging_engine_waited_for_the_engine() -> None:
    """The step that hangs never ends: what it was is not known, but it was not the front end."""
    gone = replace(
        life(1, 0, 0, 20 * MS, 0, 30_000 * MS),
        finished_ns=None,
        finish_reason="abort",
        error="client_disconnect",
    )
    found = account(gone, decodes(10, 1))
    check_sums(found)
    assert "frontend.out" not in parts(found)
    assert parts(found)["engine.stalled"] == 30_000 * MS - 200 * MS


def test_a_client_that_leaves_while_preempted_waited_for_those_who_ran() -> None:
    steps = [*decodes(2, 1), *decodes(8, 7, first_id=3)]
    steps = [
        replace(s, start_ns=i * 20 * MS, end_ns=(i + 1) * 20 * MS) for i, s in enumerate(steps)
    ]
    gone = replace(life(1, 0, 0, 20 * MS, 0, 200 * MS), finished_ns=None, finish_reason="abort")
    found = account(gone, steps)
    check_sums(found)
    assert parts(found) == {"decode.compute": 40 * MS, "batch.not_scheduled": 160 * MS}


def test_an_unfinished_request_in_the_queue_waits_there() -> None:
    accountant = Accountant(0)
    busy = [replace(s, admission=Admission.NO_PLACE) for s in decodes(10, 7)]
    accountant.add(Readings(opened=[opened(1, 5 * MS)], steps=busy, facts_complete_ns=10**15))
    accountant.due(200 * MS)
    found = accountant.find("req-1", 200 * MS)
    assert found is not None
    check_sums(found)
    assert not found.finished
    assert parts(found) == {"queue.wait": 195 * MS}
    assert found.parts[0].how == "assumed"


def test_an_unfinished_request_of_a_hanging_loop_is_stalled() -> None:
    accountant = Accountant(0)
    accountant.add(Readings(opened=[opened(1, 0)], steps=decodes(10, 1), facts_complete_ns=10**15))
    accountant.due(200 * MS)
    found = accountant.find(f"{1:032x}", 5_200 * MS)
    assert found is not None
    check_sums(found)
    assert found.top is not None
    assert (found.top.cause, found.top.ns) == ("engine.stalled", 5_000 * MS)


def test_lost_steps_are_unobserved_not_the_front_end() -> None:
    kept = decodes(100, 1)[:20]
    whole = replace(life(1, 0, 0, 20 * MS, 2_000 * MS, 2_001 * MS), output_tokens=100)
    found = account(whole, kept)
    check_sums(found)
    assert parts(found)["unobserved"] == 1_600 * MS
    assert parts(found)["frontend.out"] == 1 * MS


def test_ttft_of_a_reply_sent_whole_is_the_whole_account() -> None:
    whole = replace(life(1, 0, 0, 20 * MS, 200 * MS, 201 * MS), first_sent_ns=201 * MS)
    found = account(whole, decodes(10, 1))
    check_sums(found)
    assert {p.cause: p.ns for p in found.ttft_parts} == parts(found)


def test_what_lies_idle_after_attaching_was_seen_to_be_idle() -> None:
    late = step(5000, start=500, end=600, forward=100, shares=(share(1),))
    found = account(life(1, 150, 200, 600, 600, 600), [late], attached=100)
    check_sums(found)
    assert parts(found) == {"frontend.in": 50, "engine.gap": 300, "decode.compute": 100}


def test_excess_is_not_compute_even_before_the_model_is_fitted() -> None:
    steps = decodes(150, 1)
    slow = step(151, start=3_000 * MS, end=5_000 * MS, forward=2_000 * MS, shares=(share(1),))
    found = account(life(1, 0, 0, 20 * MS, slow.end_ns, slow.end_ns), [*steps, slow])
    check_sums(found)
    assert found.unattributed_ns > 1_900 * MS


def test_a_team_mate_that_waits_in_a_step_of_the_usual_length_delays_nobody() -> None:
    """Not even one who came in the middle of the step."""
    accountant = Accountant(0)
    step_id, at = learnt(accountant)
    gang = fact(Kind.ONCPU, at - 5, at, tid=12, ns=9 * MS, exact=0, step_id=step_id - 1)
    other = step(step_id, start=at, end=at + 10 * MS, forward=10 * MS, shares=(share(7),))
    mine = step(
        step_id + 1, start=other.end_ns, end=other.end_ns + 10 * MS, forward=10 * MS,
        shares=(share(1),),
    )  # fmt: skip
    accountant.add(Readings(facts=make_facts(gang), facts_complete_ns=10**15))
    accountant.add(
        Readings(
            steps=[other, mine],
            closed=[life(1, at + MS, at + MS, mine.end_ns, mine.end_ns, mine.end_ns)],
            facts=make_facts(fact(Kind.RUNQUEUE, at + MS, at + 9 * MS, tid=12)),
            facts_complete_ns=10**15,
        )
    )
    (found,) = accountant.due(10**15)
    check_sums(found)
    assert parts(found).get("cpu.runqueue", 0) < MS


def test_switching_the_kernel_off_moves_its_share_to_unattributed() -> None:
    shares: dict[bool, tuple[int, int]] = {}
    for on in (True, False):
        accountant = Accountant(0)
        step_id, at = learnt(accountant)
        slow = [
            step(step_id + i, start=at + i * 50 * MS, end=at + (i + 1) * 50 * MS,
                 forward=50 * MS, shares=(share(1),))
            for i in range(10)
        ]  # fmt: skip
        lost = [fact(Kind.RUNQUEUE, s.start_ns + MS, s.start_ns + 41 * MS, tid=11) for s in slow]
        if not on:
            accountant.source_off("kernel")
        end = slow[-1].end_ns
        accountant.add(
            Readings(
                steps=slow,
                closed=[life(1, at, at, slow[0].end_ns, end, end)],
                facts=make_facts(*(lost if on else [])),
                facts_complete_ns=10**15,
            )
        )
        (found,) = accountant.due(10**15)
        check_sums(found)
        shares[on] = (parts(found).get("cpu.runqueue", 0), found.unattributed_ns)
    assert shares[True][0] > 380 * MS
    assert shares[False][0] == 0
    moved = shares[False][1] - shares[True][1]
    assert abs(moved - shares[True][0]) < 0.1 * shares[True][0]


def test_who_waits_blames_those_in_the_step_for_its_price_only() -> None:
    """What a step takes beyond it, with no evidence why, is not its requests' doing."""
    accountant = Accountant(0)
    step_id, at = learnt(accountant)
    long = step(step_id, start=at, end=at + 400 * MS, forward=400 * MS, shares=(share(7),),
                admission=Admission.NO_PLACE)  # fmt: skip
    own = step(step_id + 1, start=at + 400 * MS, end=at + 410 * MS, forward=10 * MS,
               shares=(share(1),))  # fmt: skip
    late = life(1, at, at, own.end_ns, own.end_ns, own.end_ns)
    accountant.add(Readings(steps=[long, own], closed=[late], facts_complete_ns=10**15))
    (found,) = accountant.due(10**15)
    check_sums(found)
    assert 5 * MS < parts(found)["queue.wait"] < 20 * MS
    assert found.unattributed_ns > 380 * MS


def test_a_model_that_learnt_since_blames_nobody_who_was_not_there() -> None:
    """The step is priced when it is joined; the request is accounted for when it ends."""
    accountant = Accountant(0)
    step_id, at = learnt(accountant)
    alone = step(
        step_id, start=at, end=at + 210 * MS, forward=210 * MS,
        shares=(share(1, PREFILL, 200, context=0),),
    )  # fmt: skip
    accountant.add(Readings(steps=[alone], facts_complete_ns=10**15))
    accountant.due(alone.end_ns)
    end = alone.end_ns
    # Then prefills become faster, which the model learns before the request ends.
    later = [
        step(step_id + 1 + i, start=end + i * MS, end=end + (i + 1) * MS, forward=MS,
             shares=(share(5000 + i, PREFILL, 200, context=0),))
        for i in range(300)
    ]  # fmt: skip
    accountant.add(Readings(steps=later, facts_complete_ns=10**15))
    accountant.due(later[-1].end_ns)
    accountant.add(Readings(closed=[life(1, at, at, end, end, end)], facts_complete_ns=10**15))
    (found,) = accountant.due(10**15)
    check_sums(found)
    assert "batch.prefill_interference" not in parts(found)


def test_a_step_whose_host_work_stood_still_is_a_stall_for_all_that_it_held() -> None:
    steps = decodes(10, 1)
    hung = step(
        11, start=200 * MS, end=3_220 * MS, schedule=3_000 * MS, forward=20 * MS,
        shares=(share(1),),
    )  # fmt: skip
    last = step(12, start=3_220 * MS, end=3_240 * MS, forward=20 * MS, shares=(share(1), share(2)))
    end = last.end_ns
    waiting = life(2, 3_100 * MS, 3_100 * MS, end, end, end)
    accountant = Accountant(0)
    accountant.add(
        Readings(
            steps=[*steps, hung, last],
            closed=[life(1, 0, 0, 20 * MS, end, end), waiting],
            facts_complete_ns=10**15,
        )
    )
    held, queued = sorted(accountant.due(10**15), key=lambda a: a.record.request_key)
    check_sums(held)
    check_sums(queued)
    assert parts(held)["engine.stalled"] == 3_000 * MS
    assert held.top is not None
    assert held.top.cause == "engine.stalled"


def test_the_front_end_is_never_of_the_gang() -> None:
    """It sends the last step's tokens while the next one computes: that it waits delays no step."""
    accountant = Accountant(0)
    accountant.add(Readings(opened=[opened(99, 0)], facts_complete_ns=0))  # by thread 20
    step_id, at = learnt(accountant)
    ran = [
        fact(Kind.ONCPU, at + i, at + 10 * MS, tid=tid, ns=8 * MS, exact=0, step_id=step_id + i)
        for i in range(2)
        for tid in (11, 20)
    ]
    steps = [
        step(step_id + i, start=at + i * 10 * MS, end=at + (i + 1) * 10 * MS, forward=10 * MS,
             shares=(share(1),))
        for i in range(2)
    ]  # fmt: skip
    slow = step(
        step_id + 2, start=at + 20 * MS, end=at + 60 * MS, forward=40 * MS, shares=(share(1),)
    )
    waited = fact(Kind.RUNQUEUE, slow.start_ns, slow.start_ns + 30 * MS, tid=20)
    accountant.add(
        Readings(
            steps=[*steps, slow],
            closed=[life(1, at, at, at + 10 * MS, slow.end_ns, slow.end_ns)],
            facts=make_facts(*ran, waited),
            facts_complete_ns=10**15,
        )
    )
    (found,) = accountant.due(10**15)
    check_sums(found)
    assert "cpu.runqueue" not in parts(found)


def test_on_a_machine_that_is_never_quiet_the_cleanest_quarter_teaches() -> None:
    """Every step loses a tenth; the model is fitted all the same, on what is left of them."""
    accountant = Accountant(0)
    steps = decodes(1000, 1)
    rows = [
        fact(Kind.ONCPU, s.start_ns, s.end_ns, tid=11, ns=18 * MS, exact=0, step_id=s.step_id)
        for s in steps
    ]
    dice = random.Random(2)
    for s in steps:
        lost = round(dice.uniform(0.08, 0.12) * s.forward_ns)
        rows.append(fact(Kind.RUNQUEUE, s.start_ns, s.start_ns + lost, tid=11))
    accountant.add(Readings(steps=steps, facts=make_facts(*rows), facts_complete_ns=10**15))
    accountant.due(steps[-1].end_ns)
    assert accountant.model.clean_steps >= 150
    predicted = accountant.model.predict_ns(shape([share(1)]))
    assert predicted is not None
    assert 0.87 < predicted / (20 * MS) < 0.93


def beside(steps: list[Step], hog: range) -> list[tuple[int, ...]]:
    """A stranger busy on another CPU during some of the steps."""
    return [
        fact(Kind.FOREIGN, steps[i].start_ns, steps[i].end_ns, tid=0, culprit_pid=77) for i in hog
    ]


def learnt_beside(slow: range, length: int) -> int | None:
    """What a decode costs, of 400 that take 20 ms, those in `slow` longer for a stranger."""
    steps = decodes(400, 1)
    at = 0
    timed = []
    for i, one in enumerate(steps):
        forward = length if i in slow else 20 * MS
        timed.append(replace(one, start_ns=at, end_ns=at + forward, forward_ns=forward))
        at += forward
    accountant = Accountant(0)
    rows = beside(timed, slow)
    accountant.add(Readings(steps=timed, facts=make_facts(*rows), facts_complete_ns=10**15))
    accountant.source_off("kernel")  # else the gang is waited for
    accountant.due(at)
    return accountant.model.predict_ns(shape([share(1)]))


def test_a_step_beside_a_busy_neighbour_teaches_nothing() -> None:
    assert learnt_beside(range(100, 250), 60 * MS) == pytest.approx(20 * MS)


def test_a_neighbour_who_is_always_there_is_part_of_the_machine() -> None:
    assert learnt_beside(range(400), 60 * MS) == pytest.approx(60 * MS)


def test_what_was_measured_is_not_cut_by_a_guess() -> None:
    """Few steps are known: the prediction is assumed, the lost time is not."""
    steps = decodes(50, 1)
    rows = [
        fact(Kind.ONCPU, s.start_ns, s.end_ns, tid=11, ns=20 * MS, exact=0, step_id=s.step_id)
        for s in steps
    ]
    slow = step(51, start=1_000 * MS, end=1_020 * MS, forward=20 * MS, shares=(share(1),))
    rows.append(fact(Kind.RUNQUEUE, slow.start_ns, slow.start_ns + 15 * MS, tid=11))
    found = account(life(1, 0, 0, 20 * MS, slow.end_ns, slow.end_ns), [*steps, slow], *rows)
    check_sums(found)
    assert parts(found)["cpu.runqueue"] == 15 * MS
