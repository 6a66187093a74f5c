"""A question that came in on the control socket, checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.session.ledger import BYS, KEEP_NS, By

Op = Literal["explain", "why", "status", "detach"]


@dataclass(frozen=True, slots=True)
class Question:
    """`wanted`: a request or trace id; None for the slowest by `by` of the last `last_ns`. `pid`: a
    process of the engine that is asked about, where the agent watches several."""

    op: Op
    wanted: str | None
    last_ns: int
    by: By
    pid: int | None = None


def parse_question(request: Mapping[str, Any]) -> Question:
    """Raises DsagentError (exit 2) for one that this agent does not understand."""
    question = Question(
        request.get("op"),  # type: ignore[arg-type]  # all are checked below
        request.get("id"),
        request.get("last_ns", KEEP_NS),
        request.get("by", "e2e"),
        request.get("pid"),
    )
    if (
        question.op not in get_args(Op)
        or not isinstance(question.last_ns, int)
        or not isinstance(question.wanted, (str, type(None)))
        or question.by not in BYS
        or not isinstance(question.pid, (int, type(None)))
    ):
        raise DsagentError("not a request this agent understands", exit_code=USAGE)
    return question
