"""Questions over several engines: the right one is found; those that have ended are asked too."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import shell_accounts

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening.question import parse_question
from dsagent.agent.session.ledger import Ledger
from dsagent.agent.sidecar.answers import Answers
from dsagent.agent.sidecar.books import Books
from dsagent.agent.sidecar.processes import Key

NO_PROCESS = (1 << 22) + 1  # beyond the largest pid there is


class Over:
    """A watch that has done all it does, and whose accounts are still there."""

    state = "ended"
    over = True

    def __init__(self, pid: int, ledger: Ledger) -> None:
        self.key = Key(pid, 1, 0)
        self.ledger = ledger


def add(ledger: Ledger, request: str, e2e_ns: int) -> None:
    one = shell_accounts.interfered()
    now_ns = time.monotonic_ns()
    moved_ns = now_ns - one.record.sent_ns
    record = replace(
        one.record,
        request_id=request,
        external_id=None,
        sent_ns=now_ns,
        received_ns=now_ns - e2e_ns,
        first_sent_ns=(one.record.first_sent_ns or 0) + moved_ns,
    )
    ledger.add(replace(one, record=record, e2e_ns=e2e_ns))


@pytest.fixture
def answers() -> Answers:
    books = Books()
    ended = books.open(Key(NO_PROCESS + 1, 1, 0))
    add(ended, "of-ended", 3_000_000_000)
    books.close(Key(NO_PROCESS + 1, 1, 0), time.monotonic_ns())
    watches = []
    for index, request in ((2, "of-first"), (3, "of-second")):
        ledger = Ledger()
        add(ledger, request, index * 1_000_000)
        watches.append(Over(NO_PROCESS + index, ledger))
    return Answers(lambda: watches, books)  # type: ignore[arg-type, return-value]


def explain(answers: Answers, **question: Any) -> dict[str, Any]:
    return answers.explain(parse_question({"op": "explain", **question}))


@pytest.mark.parametrize("request_id", ["of-ended", "of-first", "of-second"])
def test_each_is_found_by_its_id(answers: Answers, request_id: str) -> None:
    assert explain(answers, id=request_id)["request_id"] == request_id
    assert explain(answers, id=request_id[:6])["request_id"] == request_id


def test_without_an_id_the_slowest_of_all_with_the_next_ones(answers: Answers) -> None:
    document = explain(answers)
    assert document["request_id"] == "of-ended"
    assert [each["request_id"] for each in document["others"]] == ["of-second", "of-first"]


def test_a_pid_chooses_one(answers: Answers) -> None:
    document = explain(answers, pid=NO_PROCESS + 2)
    assert document["request_id"] == "of-first"
    assert explain(answers, pid=NO_PROCESS + 1)["request_id"] == "of-ended"
    with pytest.raises(DsagentError, match="no request 'of-second'"):
        explain(answers, id="of-second", pid=NO_PROCESS + 2)
    with pytest.raises(DsagentError, match="watches no engine that process") as raised:
        explain(answers, pid=NO_PROCESS + 9)
    assert raised.value.exit_code == 2


def test_what_nobody_knows_is_an_error_for_wrong_use(answers: Answers) -> None:
    with pytest.raises(DsagentError, match="no request 'nothing' in what the") as raised:
        explain(answers, id="nothing")
    assert raised.value.exit_code == 2
    with pytest.raises(DsagentError, match="no engine has been found yet"):
        Answers(list, Books()).explain(parse_question({"op": "explain"}))


def test_why_is_over_all_or_over_one(answers: Answers) -> None:
    assert answers.why(parse_question({"op": "why"}))["requests"] == 3
    one = answers.why(parse_question({"op": "why", "pid": NO_PROCESS + 3}))
    assert (one["requests"], len(one["worst"])) == (1, 1)


def test_that_an_engine_did_not_answer_says_more_than_that_another_does_not_know(
    answers: Answers,
) -> None:
    class Busy(Over):
        over = False

        def call(self, _work: object) -> None:
            raise DsagentError("the watch over process 9 does not answer; try again")

    busy = Busy(NO_PROCESS + 9, Ledger())
    both = Answers(lambda: [*answers._watches(), busy], Books())  # type: ignore[list-item]
    with pytest.raises(DsagentError, match="does not answer") as raised:
        explain(both, id="nothing")
    assert raised.value.exit_code == 1
