"""Why a request was slow is what exceeds the usual, not what is large for everybody."""

from __future__ import annotations

from account_facts import record

from dsagent.agent.attribution.account import Account, Part
from dsagent.agent.attribution.norms import ENOUGH, Norms

MS = 1_000_000


def account(**parts: int) -> Account:
    total = sum(parts.values()) * MS
    return Account(
        record=record(1, received=0, sent=total),
        partial=False,
        finished=True,
        e2e_ns=total,
        parts=tuple(Part(c.replace("__", "."), ns * MS, "measured") for c, ns in parts.items()),
        unattributed_ns=0,
        ttft_parts=(),
        ttft_unattributed_ns=None,
        delayed_by=(),
        step_ids=tuple(range(10)),
    )


def usual() -> Account:
    return account(
        decode__compute=600, batch__prefill_interference=200, frontend__in=2, engine__host=20
    )


def learnt() -> Norms:
    norms = Norms()
    for _ in range(2 * ENOUGH):
        norms.judge(usual())
    return norms


def top(found: Account) -> str | None:
    return found.top.cause if found.top else None


def test_without_norms_own_work_is_no_answer() -> None:
    assert top(account(decode__compute=600, cpu__runqueue=100)) == "cpu.runqueue"
    assert top(account(decode__compute=990, cpu__runqueue=10)) == "decode.compute"


def test_what_everybody_pays_does_not_hide_what_only_this_one_paid() -> None:
    found = learnt().judge(
        account(decode__compute=600, batch__prefill_interference=210, cpu__runqueue=120)
    )
    assert top(found) == "cpu.runqueue"


def test_a_slow_tokenizer_or_sampler_is_seen_by_its_own_norm() -> None:
    assert top(learnt().judge(account(decode__compute=600, frontend__in=300))) == "frontend.in"
    assert top(learnt().judge(account(decode__compute=600, engine__host=400))) == "engine.host"


def test_a_usual_request_is_its_own_compute() -> None:
    assert top(learnt().judge(usual())) == "decode.compute"


def test_failed_and_partial_ones_teach_nothing() -> None:
    norms = Norms()
    for _ in range(2 * ENOUGH):
        norms.judge(Account(
            record(1, received=0, sent=MS, error="client_disconnect"), False, True, MS, (), MS,
            (), None, (),
        ))  # fmt: skip
    assert top(norms.judge(account(decode__compute=600, engine__host=400))) == "decode.compute"


def test_a_machine_that_is_always_bad_is_still_the_reason() -> None:
    """A hog that has been there all day is usual, and no less to blame."""
    norms = Norms()
    for _ in range(2 * ENOUGH):
        norms.judge(account(decode__compute=600, cpu__runqueue=400, engine__host=20))
    found = norms.judge(account(decode__compute=600, cpu__runqueue=400, engine__host=120))
    assert top(found) == "cpu.runqueue"
