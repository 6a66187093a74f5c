"""Every expression of every file: parsed, held against what there is, and evaluated."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsagent.dashboards.doctor import expression, rules
from dsagent.dashboards.doctor.boards import Board, as_board
from dsagent.dashboards.doctor.expression import NotPromqlError
from dsagent.dashboards.doctor.files import load
from dsagent.dashboards.doctor.findings import Asked, Finding, InputError, Quiet
from dsagent.dashboards.doctor.known import Known
from dsagent.dashboards.doctor.quiet import excuse, may_have
from dsagent.dashboards.doctor.renames import SUFFIXES, rename_of
from dsagent.dashboards.doctor.tree import Foreseen, Selector, read

CLOSE = 0.9  # of 1: a name so alike may be what was meant


@dataclass(slots=True)
class Report:
    """Of one file. `alive`: expressions with a result, or with nothing against them where nobody
    could evaluate."""

    path: str
    expressions: int = 0
    alive: int = 0
    elsewhere: int = 0
    quiet: list[Quiet] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "expressions": self.expressions,
            "alive": self.alive,
            "not_promql": self.elsewhere,
            "quiet": [{"where": each.where, "reason": each.reason} for each in self.quiet],
        }


def check(paths: Sequence[Path], known: Known | None) -> list[Report]:
    """`known` None: only what can be said without any metrics."""
    loaded: list[tuple[Report, Any]] = []
    made: set[str] = set()
    for path in paths:
        report, document = Report(str(path)), None
        try:
            document = load(path)
        except InputError as error:
            report.findings.append(Finding(report.path, "", "unreadable", str(error)))
        loaded.append((report, document))
        if isinstance(document, dict) and rules.is_rules(document):
            made |= rules.recorded(document)
    by_uid: dict[str, str] = {}
    for report, document in loaded:
        _check_file(report, document, _Judge(known, made), by_uid)
    return [report for report, _ in loaded]


def _check_file(report: Report, document: Any, judge: _Judge, by_uid: dict[str, str]) -> None:
    asked: list[Asked] = []
    if (board := as_board(document)) is not None:
        read_board = Board(report.path, board)
        asked, report.elsewhere = read_board.asked, read_board.elsewhere
        report.findings += read_board.findings
        if read_board.uid:
            first = by_uid.setdefault(read_board.uid, report.path)
            if first != report.path:
                message = f"the same uid as {first}: importing one overwrites the other"
                report.findings.append(Finding(report.path, "", "uid", message))
    elif rules.is_rules(document):
        asked = rules.asked(document)
    elif not report.findings and not _is_of_others(document):
        message = "it is neither a board nor rules"
        report.findings.append(Finding(report.path, "", "unreadable", message))
    for each in asked:
        report.expressions += 1
        before = len(report.findings), len(report.quiet)
        judge.judge(each, report)
        report.alive += before == (len(report.findings), len(report.quiet))


def _is_of_others(document: Any) -> bool:
    """promtool's unit tests, Grafana's provisioning of other things, kustomize's own files."""
    return isinstance(document, dict) and (
        document.get("kind") == "Kustomization"
        or any(
            key in document
            for key in ("tests", "contactPoints", "policies", "datasources", "providers")
        )
    )


class _Judge:
    def __init__(self, known: Known | None, recorded: set[str]) -> None:
        self._known = known
        self._recorded = recorded
        self._names = known.names() if known else frozenset()

    def judge(self, asked: Asked, report: Report) -> None:
        def say(problem: Any, message: str) -> None:
            expr = asked.expr[: expression.MOST_CHARS]
            report.findings.append(Finding(report.path, asked.where, problem, message, expr))

        try:
            filled, unknown = expression.fill_in(asked.expr, asked.variables)
            for name in sorted(unknown):
                say("variable", f"${name}: the board has no such variable")
            reading = read(expression.parse(filled), self._labels_of)
        except NotPromqlError as error:
            say("syntax", str(error))
            return
        except RecursionError:
            say("syntax", "it nests too deeply")
            return
        said = len(report.findings)
        for problem, message in reading.problems:
            say(problem, message)
        reasons = [
            reason
            for selector in self._wanted(reading.selectors)
            if (reason := self._missing(selector, say))
        ]
        if len(report.findings) == said:
            reasons += self._evaluate(filled, reading.selectors, reading.filters, say)
        report.quiet += [Quiet(asked.where, reason) for reason in dict.fromkeys(reasons)]

    def _wanted(self, selectors: list[Selector]) -> list[Selector]:
        """Those whose metric must be there; of alternatives where none is, the first."""
        named = {each.name: each for each in reversed(selectors) if each.name}
        alternatives = [each for each in named.values() if each.foreseen is Foreseen.ALTERNATIVE]
        there = [each for each in alternatives if self._is_there(each.name)]
        missing = alternatives[-1:] if self._known and not there else []
        return [
            each
            for each in selectors
            if each.name
            and (each.foreseen is Foreseen.NO or self._is_there(each.name) or each in missing)
        ]

    def _is_there(self, name: str) -> bool:
        return name in self._names or name in self._recorded

    def _labels_of(self, name: str) -> frozenset[str] | None:
        if self._known is None or name in self._recorded or name not in self._names:
            return None
        samples = self._known.samples(name)
        if not samples:  # once, and not now
            return None
        seen = frozenset(key for sample in samples for key in sample.labels)
        return seen | self._known.added() | may_have(name)

    def _missing(self, selector: Selector, say: Any) -> str:
        """Complains of a metric that is not there; else why it is quiet, if it is."""
        name = selector.name
        if name in self._recorded:
            return ""
        there = name in self._names
        rename = rename_of(name)
        if rename is not None:
            if there and rename.new in self._names:
                say("deprecated", f"{name} will go: take {rename.new} ({rename.how})")
            elif not there:
                now = f"{name} is {rename.new} now" if rename.new else f"{name} is no more"
                say("renamed", f"{now} ({rename.how})")
            return ""
        if self._known is None:
            return ""
        if there:
            return self._unmatched(selector)
        if reason := excuse(name, self._known):
            return f"{name}: {reason}"
        say("dead", f"there is no {name}{self._meant(name)}")
        return ""

    def _meant(self, name: str) -> str:
        """A name that was probably meant."""
        for suffix in SUFFIXES:
            for other in (name + suffix, name.removesuffix(suffix)):
                if other != name and other in self._names:
                    return f"; there is {other}"
        close = difflib.get_close_matches(name, self._names, 1, CLOSE)
        return f"; is it {close[0]}?" if close else ""

    def _unmatched(self, selector: Selector) -> str:
        assert self._known is not None
        samples = self._known.samples(selector.name)
        added = self._known.added()
        matchers = [
            matcher
            for matcher in selector.matchers
            if not (matcher.name in added and all(matcher.name not in s.labels for s in samples))
        ]
        if any(all(m.takes(s.labels.get(m.name, "")) for m in matchers) for s in samples):
            return ""
        shown = ",".join(f'{m.name}{m.op}"{m.value}"' for m in matchers)
        return f"{selector.name}: no series now with {{{shown}}}"

    def _evaluate(
        self, filled: str, selectors: list[Selector], filters: bool, say: Any
    ) -> list[str]:
        answer = self._known.ask(filled) if self._known else None
        if answer is None or answer.series:
            return []
        if answer.error:
            say("dead", f"the server refuses it: {answer.error}")
            return []
        if any(self._is_empty(selector) for selector in selectors):
            return []  # said already, or foreseen
        if filters:
            return ["nothing passes its comparison now"]
        if any(each.name in self._recorded for each in selectors):
            return ["its rules have not been evaluated yet"]
        say("dead", "nothing comes out, though each of its series is there: they do not match")
        return []

    def _is_empty(self, selector: Selector) -> bool:
        return bool(
            not selector.name or selector.name not in self._names or self._unmatched(selector)
        )
