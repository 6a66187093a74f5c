"""What a Grafana board asks, and through which data sources. Read as written by a stranger."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from dsagent.dashboards.doctor.findings import Asked, Finding, Problem, one_line

MOST_PANELS = 2_000
MOST_ASKED = 10_000
MOST_VARIABLE_CHARS = 2_000
OLDEST_SCHEMA = 36  # Grafana 9; older ones are migrated by guessing

_VARIABLE = re.compile(r"^\$(?:\{(\w+)(?:[:.][^}]*)?\}|(\w+)|\[\[(\w+)\]\])$|^\[\[(\w+)\]\]$")
_BUILT_IN = frozenset(("-- Grafana --", "-- Mixed --", "-- Dashboard --", "grafana", "__expr__"))
_LABEL_VALUES = re.compile(r"^label_values\(\s*(?:(?P<of>.+),\s*)?(?P<label>\w+)\s*\)$", re.DOTALL)
_QUERY_RESULT = re.compile(r"^query_result\((?P<expr>.+)\)$", re.DOTALL)


def as_board(document: Any) -> dict[str, Any] | None:
    """The board in a document: itself, or what Grafana's API and exports wrap it in."""
    if not isinstance(document, dict):
        return None
    inner = document.get("dashboard")
    board = inner if isinstance(inner, dict) else document
    return board if isinstance(board.get("panels", board.get("rows")), list) else None


class Board:
    """One board; `asked` and `findings` are what it has to say."""

    def __init__(self, path: str, board: dict[str, Any]) -> None:
        self._path = path
        self._board = board
        self._variables, self._datasources = self._read_variables()
        self._named: Counter[str] = Counter()  # complaint about a data source → how often
        self.findings: list[Finding] = []
        self.elsewhere = 0  # targets of other kinds of data sources: not PromQL
        self.asked = list(self._ask())
        self._judge()

    @property
    def uid(self) -> str:
        return str(self._board.get("uid") or "")

    def _say(self, where: str, problem: Problem, message: str) -> None:
        self.findings.append(Finding(self._path, where, problem, message))

    def _judge(self) -> None:
        for complaint, times in self._named.items():
            self._say("", "datasource", f"{complaint} ({times} ×)")
        version = self._board.get("schemaVersion")
        if isinstance(version, int) and version < OLDEST_SCHEMA:
            self._say(
                "",
                "old",
                f"schemaVersion {version}: Grafana migrates what is older than "
                f"{OLDEST_SCHEMA} by guessing; open it once and save it",
            )

    def _read_variables(self) -> tuple[dict[str, str | None], dict[str, str]]:
        """Values by the variable's name, and kinds of data sources by theirs."""
        values: dict[str, str | None] = {}
        kinds: dict[str, str] = {}
        for variable in _dicts(_get(self._board, "templating", "list")):
            name = variable.get("name")
            if not isinstance(name, str):
                continue
            current = _get(variable, "current", "value")
            values[name] = current if isinstance(current, str) and "$" not in current else None
            if variable.get("type") == "datasource":
                kinds[name] = str(variable.get("query"))
        for given in _dicts(self._board.get("__inputs")):
            name = given.get("name")
            if isinstance(name, str):
                values.setdefault(name, None)
        return values, kinds

    def _panels(self) -> Iterator[dict[str, Any]]:
        queue = [*_dicts(self._board.get("panels")), *_dicts(self._board.get("rows"))]
        seen = 0
        while queue and seen < MOST_PANELS:
            panel = queue.pop(0)
            seen += 1
            queue[:0] = _dicts(panel.get("panels"))
            yield panel
        if queue:
            self._say("", "unreadable", f"more than {MOST_PANELS} panels: the others are not read")

    def _ask(self) -> Iterator[Asked]:
        count = 0
        for panel in self._panels():
            where = one_line(panel.get("title") or f"panel {panel.get('id', '?')}", 80)
            for target in _dicts(panel.get("targets")):
                expr = target.get("expr")
                if not self._is_prometheus(target, panel, where):
                    self.elsewhere += 1
                elif isinstance(expr, str) and (expr.strip() or not target.get("hide")):
                    count += 1
                    if count > MOST_ASKED:
                        return
                    yield Asked(where, expr, self._variables)
        yield from self._of_variables()
        for note in _dicts(_get(self._board, "annotations", "list")):
            if isinstance(note.get("expr"), str) and self._is_prometheus(note, {}, "annotation"):
                where = f"annotation {one_line(note.get('name'), 60)}"
                yield Asked(where, note["expr"], self._variables)

    def _of_variables(self) -> Iterator[Asked]:
        for variable in _dicts(_get(self._board, "templating", "list")):
            if variable.get("type") != "query":
                continue
            name = one_line(variable.get("name"), 60)
            where = f"variable {name}"
            if not self._is_prometheus(variable, {}, where):
                continue
            text = variable.get("query")
            if isinstance(text, dict):
                text = text.get("query")
            expr = variable_expression(text) if isinstance(text, str) else None
            if expr is not None:
                yield Asked(where, expr, self._variables)

    def _is_prometheus(self, target: dict[str, Any], panel: dict[str, Any], where: str) -> bool:
        """Whether a target speaks PromQL; complaints about how it names its source are kept."""
        source = target.get("datasource")
        if source is None:
            source = panel.get("datasource")
        if source is None:  # the default one
            return "expr" in target or "query" in target
        kind, uid = "prometheus", source
        if isinstance(source, dict):
            kind, uid = str(source.get("type") or "prometheus"), source.get("uid")
        if uid is not None and not isinstance(uid, str):
            self._named[f"what names a data source is no text: {one_line(uid, 60)}"] += 1
            return kind == "prometheus"
        if uid in _BUILT_IN or kind in ("datasource", "grafana", "__expr__"):
            return False
        if uid is None:
            self._named[f"the data source has a type and no uid: {one_line(kind)}"] += 1
            return kind == "prometheus"
        found = _VARIABLE.match(uid)
        if found is None:
            what = "uid" if isinstance(source, dict) else "name"
            self._named[
                f"fixed {what} of a data source: {one_line(uid, 60)!r}; use a variable"
            ] += 1
            return kind == "prometheus"
        name = next(group for group in found.groups() if group)
        if name in self._datasources:
            kind = self._datasources[name]
        elif name in self._variables:
            self._named[
                f"${{{name}}} is filled in by an import only: provisioning leaves it as it is"
            ] += 1
        else:
            self._say(where, "datasource", f"${{{name}}}: the board has no such variable")
        return kind == "prometheus"


def variable_expression(text: str) -> str | None:
    """What a variable's query asks of the metrics, as PromQL; None where it asks none."""
    text = text.strip()
    if len(text) > MOST_VARIABLE_CHARS:
        return None
    if found := _LABEL_VALUES.match(text):
        # A label of a metric, as an aggregate that needs that label.
        return f"group by ({found['label']}) ({found['of']})" if found["of"] else None
    if found := _QUERY_RESULT.match(text):
        return found["expr"]
    return None


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
