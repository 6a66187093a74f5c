"""What is asked of whom in the tree of an expression, and what cannot work in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from promql_parser import (
    AggModifierType,
    AggregateExpr,
    BinaryExpr,
    Call,
    LabelModifierType,
    MatchOp,
    MatrixSelector,
    ParenExpr,
    SubqueryExpr,
    UnaryExpr,
    VectorSelector,
)

from dsagent.dashboards.doctor.findings import Problem

MOST_VALUE_CHARS = 1024

_COMPARISONS = ("==", "!=", ">", "<", ">=", "<=")
_SETS = ("and", "or", "unless")
_KEEP_LABELS = ("topk", "bottomk", "limitk", "limit_ratio")
_ABSENT = ("absent", "absent_over_time")
_MAKE_LABELS = ("label_replace", "label_join")


@dataclass(frozen=True, slots=True)
class Matcher:
    name: str
    op: str  # = != =~ !~
    value: str

    def takes(self, value: str) -> bool:
        """Whether a label's value matches; a label that is not there has the empty one."""
        if self.op == "=":
            return value == self.value
        if self.op == "!=":
            return value != self.value
        if not _is_quick(self.value) or len(value) > MOST_VALUE_CHARS:
            return True  # the server judges
        try:
            matches = re.fullmatch(self.value, value, re.DOTALL) is not None
        except re.error:  # of Go's syntax and not of ours
            return True
        return matches == (self.op == "=~")


def _is_quick(pattern: str) -> bool:
    """Whether our regular expressions, which backtrack, are sure to end soon. Go's always do."""
    repeated = sum(pattern.count(mark) for mark in "*+{")
    return repeated <= 2 and not re.search(r"\)[*+{?]", pattern)


class Foreseen(Enum):
    """Whether a metric may be missing where it is asked for."""

    NO = "no"
    ABSENT = "absent"  # absent() is about those that are
    ALTERNATIVE = "alternative"  # of `a or b` one will do


@dataclass(frozen=True, slots=True)
class Selector:
    """Which series are asked for. `name` is empty where only labels are given."""

    name: str
    matchers: tuple[Matcher, ...]
    foreseen: Foreseen


@dataclass(frozen=True, slots=True)
class Labels:
    """Those of a result. `exact`: it has these and no others; None: unknown."""

    names: frozenset[str] | None
    exact: bool = False


UNKNOWN = Labels(None)
NO_LABELS = Labels(frozenset(), exact=True)


@dataclass(slots=True)
class Reading:
    """What was found in one expression. `filters`: a comparison may rightly leave nothing."""

    selectors: list[Selector] = field(default_factory=list)
    problems: list[tuple[Problem, str]] = field(default_factory=list)
    filters: bool = False


def read(tree: Any, labels_of: Callable[[str], frozenset[str] | None]) -> Reading:
    """`labels_of`: the labels that a series may have; None for one that is not known."""
    walk = _Walk(labels_of)
    walk.visit(tree, Foreseen.NO)
    return walk.reading


def selectors(tree: Any) -> list[Selector]:
    return read(tree, lambda _name: None).selectors


class _Walk:
    def __init__(self, labels_of: Callable[[str], frozenset[str] | None]) -> None:
        self._labels_of = labels_of
        self.reading = Reading()

    def visit(self, node: Any, foreseen: Foreseen) -> Labels:
        labels = NO_LABELS  # of a number or a string
        match node:
            case VectorSelector():
                labels = self._selector(node, foreseen)
            case MatrixSelector():
                labels = self._selector(node.vector_selector, foreseen)
            case ParenExpr() | UnaryExpr() | SubqueryExpr():
                labels = self.visit(node.expr, foreseen)
            case AggregateExpr():
                labels = self._aggregate(node, foreseen)
            case BinaryExpr():
                labels = self._binary(node, foreseen)
            case Call():
                labels = self._call(node, foreseen)
        return labels

    def _say(self, problem: Problem, message: str) -> None:
        if (problem, message) not in self.reading.problems:
            self.reading.problems.append((problem, message))

    def _selector(self, node: Any, foreseen: Foreseen) -> Labels:
        name = node.name or ""
        matchers = []
        for each in node.matchers.matchers:
            if each.name == "__name__":
                name = each.value if each.op == MatchOp.Equal else ""
            else:
                matchers.append(Matcher(each.name, _OPS[str(each.op)], each.value))
        selector = Selector(name, tuple(matchers), foreseen)
        self.reading.selectors.append(selector)
        labels = self._labels_of(name) if name else None
        if labels is None:
            return UNKNOWN
        for matcher in matchers:
            if matcher.name not in labels and not matcher.takes(""):
                self._say("labels", f"{name} has no label {matcher.name}{_of(labels)}")
        return Labels(labels)

    def _aggregate(self, node: Any, foreseen: Foreseen) -> Labels:
        below = self.visit(node.expr, foreseen)
        modifier = node.modifier
        if str(node.op) in _KEEP_LABELS:
            return below
        if modifier is None:
            return NO_LABELS
        named = frozenset(modifier.labels)
        if modifier.type == AggModifierType.Without:
            return UNKNOWN if below.names is None else Labels(below.names - named, below.exact)
        if below.names is not None:
            for label in sorted(named - below.names):
                self._say(
                    "labels",
                    f"by ({label}): what is aggregated has no such label{_of(below.names)}",
                )
        return Labels(named, exact=True)

    def _binary(self, node: Any, foreseen: Foreseen) -> Labels:
        op = str(node.op)
        if op == "or":
            return self._alternatives(node, foreseen)
        left, right = self.visit(node.lhs, foreseen), self.visit(node.rhs, foreseen)
        modifier = node.modifier
        if op in _SETS or (op in _COMPARISONS and not (modifier and modifier.return_bool)):
            self.reading.filters = True
        scalar_left, scalar_right = _is_scalar(node.lhs), _is_scalar(node.rhs)
        if scalar_left or scalar_right:
            return right if scalar_left else left
        matching = modifier.matching if modifier else None
        self._match(op, matching, left, right)
        kept = left
        if modifier and "OneToMany" in str(modifier.card):
            kept = right
        extra = frozenset((modifier and modifier.group_labels) or ())
        return kept if kept.names is None else Labels(kept.names | extra, kept.exact)

    def _alternatives(self, node: Any, foreseen: Foreseen) -> Labels:
        """`a or b`: one of two may be missing where the other one is a metric, too."""
        both = _has_selector(node.lhs) and _has_selector(node.rhs)
        left = self.visit(
            node.lhs, Foreseen.ALTERNATIVE if both and foreseen is Foreseen.NO else foreseen
        )
        right = self.visit(
            node.rhs, Foreseen.ALTERNATIVE if both and foreseen is Foreseen.NO else foreseen
        )
        if left.names is None or right.names is None:
            return UNKNOWN
        return Labels(left.names | right.names)

    def _match(self, op: str, matching: Any, left: Labels, right: Labels) -> None:
        if left.names is None or right.names is None:
            return
        named = frozenset(matching.labels) if matching else frozenset()
        if matching and matching.type == LabelModifierType.Include:
            for side, labels in (("left", left), ("right", right)):
                for label in sorted(named - labels.names if labels.names is not None else ()):
                    self._say("labels", f"on ({label}): the {side} of {op} has no such label")
            return
        if left.exact and right.exact and left.names - named != right.names - named:
            self._say(
                "labels",
                f"the two sides of {op} never match: one has {_named(left.names)}, the other "
                f"{_named(right.names)}",
            )

    def _call(self, node: Any, foreseen: Foreseen) -> Labels:
        name = node.func.name
        inside = [
            self.visit(argument, Foreseen.ABSENT if name in _ABSENT else foreseen)
            for argument in node.args
        ]
        if name == "histogram_quantile":
            self._quantile(node.args[1])
            below = inside[1]
            return below if below.names is None else Labels(below.names - {"le"}, below.exact)
        if name in _MAKE_LABELS:
            made = getattr(node.args[1], "val", None)
            below = inside[0]
            if below.names is None or not isinstance(made, str):
                return UNKNOWN
            return Labels(below.names | {made}, below.exact)
        if name in _ABSENT or name in ("scalar", "vector", "time"):
            return UNKNOWN if name in _ABSENT else NO_LABELS
        vectors = [labels for labels in inside if labels is not NO_LABELS]
        return vectors[0] if vectors else NO_LABELS

    def _quantile(self, node: Any, dropped: str = "") -> None:
        """The bounds must come through every aggregation between the buckets and the quantile."""
        match node:
            case AggregateExpr() if str(node.op) not in _KEEP_LABELS:
                modifier = node.modifier
                by = modifier is not None and modifier.type == AggModifierType.By
                keeps = modifier is not None and ("le" in modifier.labels) == by
                self._quantile(node.expr, dropped if keeps else str(node.op))
            case AggregateExpr() | ParenExpr() | UnaryExpr() | SubqueryExpr():
                self._quantile(node.expr, dropped)
            case BinaryExpr():
                self._quantile(node.lhs, dropped)
                self._quantile(node.rhs, dropped)
            case Call():
                for argument in node.args:
                    self._quantile(argument, dropped)
            case VectorSelector() | MatrixSelector():
                inner: Any = getattr(node, "vector_selector", node)
                name = inner.name or ""
                if dropped and name.endswith("_bucket"):
                    self._say(
                        "le",
                        f"histogram_quantile needs le, and {dropped} drops it: write by (le, …)",
                    )


_OPS = {
    "MatchOp.Equal": "=",
    "MatchOp.NotEqual": "!=",
    "MatchOp.Re": "=~",
    "MatchOp.NotRe": "!~",
}


def _has_selector(node: Any) -> bool:
    walk = _Walk(lambda _name: None)
    walk.visit(node, Foreseen.NO)
    return bool(walk.reading.selectors)


def _is_scalar(node: Any) -> bool:
    match node:
        case ParenExpr() | UnaryExpr():
            return _is_scalar(node.expr)
        case BinaryExpr():
            return _is_scalar(node.lhs) and _is_scalar(node.rhs)
        case Call():
            return node.func.name in ("scalar", "time", "pi")
    return not isinstance(node, VectorSelector | MatrixSelector | AggregateExpr | SubqueryExpr)


def _named(labels: frozenset[str]) -> str:
    return ", ".join(sorted(labels)) or "no labels"


def _of(labels: frozenset[str]) -> str:
    shown = sorted(labels)[:8]
    return f" (it has {', '.join(shown)}{', …' if len(labels) > 8 else ''})" if shown else ""
