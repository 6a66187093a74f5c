"""Questions from the control socket, honest and not."""

from __future__ import annotations

from typing import Any

import pytest

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening.question import Question, parse_question
from dsagent.agent.session.ledger import KEEP_NS


def test_a_question_and_what_it_means_without_more() -> None:
    asked = {"op": "explain", "id": "req-1", "last_ns": 5, "by": "ttft"}
    assert parse_question(asked) == Question("explain", "req-1", 5, "ttft")
    assert parse_question({"op": "why"}) == Question("why", None, KEEP_NS, "e2e")


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"op": "stop"},
        {"op": ["explain"]},
        {"op": "why", "last_ns": "5"},
        {"op": "explain", "id": 5},
        {"op": "explain", "by": "name"},
        {"op": "explain", "by": {"e2e": 1}},
    ],
)
def test_what_is_no_question_is_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(DsagentError, match="not a request this agent understands") as refused:
        parse_question(request_)
    assert refused.value.exit_code == 2
