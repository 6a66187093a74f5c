"""What the doctor says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Problem = Literal[
    "unreadable",  # no board and no rules
    "syntax",  # not PromQL
    "dead",  # no such metric, or nothing ever comes out
    "renamed",  # the metric has another name now
    "deprecated",  # still there under its old name, soon gone
    "labels",  # a label that the metric does not have, or sides that cannot match
    "le",  # a quantile of buckets that were summed without their bounds
    "variable",  # a variable that the board does not have
    "datasource",  # not through a variable: it works in one Grafana only
    "uid",  # two boards with one uid: the second overwrites the first
    "old",  # a board's format that today's Grafana has to guess at
]


class InputError(Exception):
    """Nothing can be checked; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to be put right. `where`: a panel's, a rule's or a variable's name."""

    path: str
    where: str
    problem: Problem
    message: str
    expr: str = ""

    def to_json(self) -> dict[str, str]:
        document = {
            "path": self.path,
            "where": self.where,
            "problem": self.problem,
            "message": self.message,
        }
        return {**document, "expr": self.expr} if self.expr else document


@dataclass(frozen=True, slots=True)
class Quiet:
    """An expression without a result, for a reason that is no fault of the board's."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """One expression that a file asks. `variables`: name → a value that it may have; None: any."""

    where: str
    expr: str
    variables: Mapping[str, str | None]


def one_line(text: object, most: int = 160) -> str:
    """Text out of a file made fit to be shown."""
    shown = " ".join(str(text).split())
    shown = "".join(c if c.isprintable() else "?" for c in shown)
    return shown if len(shown) <= most else shown[: most - 1] + "…"
