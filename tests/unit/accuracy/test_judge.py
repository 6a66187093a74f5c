"""What an account should have said, by hand-made truths."""

from __future__ import annotations

from typing import Any

import pytest

from dsagent.agent.attribution.account import Account, Part
from dsagent.instrumentation.records import RequestRecord

from baseline import Facts  # isort: skip  # of the laboratory
from judge import cases  # isort: skip
from score import Case  # isort: skip
from truth import Evidence, Fault, Injection, Timeline, life  # isort: skip

SECOND = 1_000_000_000
PAIR = Fault(
    "pair",
    frozenset({"process.stopped"}),
    "logged",
    life,
    queued=frozenset({"cpu.runqueue"}),
)


def account(*parts: tuple[str, int]) -> Account:
    """Of a request that lived from 1 s to 2 s; the rest of it is its own computing."""
    times = dict.fromkeys(("tokenised_ns", "queued_ns", "first_scheduled_ns"), SECOND)
    times |= dict.fromkeys(("first_token_ns", "first_sent_ns", "finished_ns"), 2 * SECOND)
    ids = {"request_key": 1, "request_id": "r", "trace_id": 170, "span_id": 1}
    rest: dict[str, Any] = {"operation": "chat", "model": "m", "pid": 1, "tid": 1}
    rest |= {"output_tokens": 5, "cached_tokens": 0, "prompt_tokens": 5}
    fields: dict[str, Any] = dict.fromkeys(RequestRecord.__match_args__)
    fields |= ids | times | rest | {"received_ns": SECOND, "sent_ns": 2 * SECOND}
    own_ns = SECOND - sum(ns for _, ns in parts)
    told = [Part(cause, ns, "measured") for cause, ns in (*parts, ("decode.compute", own_ns))]
    record = RequestRecord(**fields)
    return Account(record, False, True, SECOND, tuple(told), 0, (), None, ())


def judged(said: Account, *, stopped_ns: int, waited_ns: tuple[int, int]) -> Case:
    """With a stop of that length, and waiting for a CPU by the kernel's account, least and most."""
    start_ns = SECOND + 100
    stop = Timeline.of([(start_ns, start_ns + stopped_ns)])
    waited = [Timeline([(SECOND, 0.0), (2 * SECOND, float(ns))]) for ns in waited_ns]
    deed = Injection("pair", start_ns, start_ns + stopped_ns, stop)
    evidence = Evidence({"pair": PAIR}, [deed], {said.trace_id: said}, [], *waited)
    (case,) = cases(evidence, Facts({}))
    return case


@pytest.mark.parametrize(
    ("said", "stopped_ms", "waited_ms", "right"),
    [
        ({"process.stopped": 400, "cpu.runqueue": 300}, 400, (250, 300), True),
        ({"process.stopped": 300, "cpu.runqueue": 400}, 400, (250, 300), False),  # the smaller
        ({"process.stopped": 200, "cpu.runqueue": 400}, 200, (350, 400), True),
        ({"process.stopped": 400, "cpu.runqueue": 200}, 200, (350, 400), False),
        ({"process.stopped": 200, "cpu.runqueue": 300}, 300, (250, 400), True),  # who knows
        ({"process.stopped": 400}, 400, (250, 300), False),  # the other one is not told
        ({"process.stopped": 400}, 400, (50, 60), True),  # and need not be: it is too small
        ({"process.stopped": 200, "lock.wait": 300}, 300, (250, 400), False),
    ],
)
def test_of_two_deeds_the_larger_is_on_top_and_both_are_told(
    said: dict[str, int], stopped_ms: int, waited_ms: tuple[int, int], right: bool
) -> None:
    told = account(*((cause, ms * 1_000_000) for cause, ms in said.items()))
    least, most = (ms * 1_000_000 for ms in waited_ms)
    case = judged(told, stopped_ns=stopped_ms * 1_000_000, waited_ns=(least, most))
    assert case.affected
    assert case.right is right
