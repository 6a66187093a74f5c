"""One PromQL expression: Grafana's variables out of it, then its tree.

The parser is a native library that recurses: what nests too deeply would end
the process, so that it is refused before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import promql_parser

MOST_CHARS = 20_000
MOST_NESTING = 400  # marks that may nest; the parser was seen to fail at 5,000

# Grafana's own, whatever the board: as durations, numbers or text.
_DURATIONS = ("__interval", "__rate_interval", "__range", "interval", "rate_interval")
_NUMBERS = {
    "__interval_ms": "60000",
    "__range_s": "3600",
    "__range_ms": "3600000",
    "__from": "0",
    "__to": "0",
}
_TEXTS = ("__dashboard", "__org", "__user", "__name", "timeFilter", "__timeFilter", "__all")
_VARIABLE = re.compile(
    r"\$\{(?P<braced>\w+)(?:[.:][^}]*)?\}|\[\[(?P<old>\w+)(?::\w+)?\]\]|\$(?P<bare>[A-Za-z_]\w*)"
)
_STRING = re.compile(
    r"(?:(?P<op>=~|!~|!=|=)\s*)?(?P<text>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|`[^`]*`)"
)
_PLAIN = re.compile(r"[A-Za-z0-9_:.]+")
_NESTS = frozenset("([{+-*/%^<>=")
DURATION = "5m"


class NotPromqlError(Exception):
    """The message is one line for a person."""


def fill_in(expr: str, variables: Mapping[str, str | None]) -> tuple[str, set[str]]:
    """The expression for any value of its variables, and those that nobody knows.

    A matcher with a variable in its value matches all; elsewhere a variable becomes a value that
    it may have, or what may stand there. NotPromqlError where it is too long to look at."""
    if len(expr) > MOST_CHARS:
        raise NotPromqlError(f"it is longer than anybody could read ({len(expr)} characters)")
    unknown: set[str] = set()

    def know(match: re.Match[str]) -> str:
        name = match["braced"] or match["old"] or match["bare"]
        if name not in variables and name not in (*_DURATIONS, *_NUMBERS, *_TEXTS):
            unknown.add(name)
        return name

    pieces: list[str] = []
    at = 0
    for found in _STRING.finditer(expr):
        pieces.append(_fill_bare(expr[at : found.start()], know, variables))
        pieces.append(_fill_string(found, know, variables))
        at = found.end()
    pieces.append(_fill_bare(expr[at:], know, variables))
    return "".join(pieces), unknown


def _fill_string(
    found: re.Match[str], know: Callable[[re.Match[str]], str], variables: Mapping[str, str | None]
) -> str:
    used = [know(match) for match in _VARIABLE.finditer(found["text"])]
    if not used:
        return found[0]
    if found["op"] in ("=", "=~"):
        return '=~".*"'
    if found["op"] in ("!=", "!~"):
        return '!~"~nobody~"'
    return _VARIABLE.sub(lambda match: variables.get(know(match)) or "x", found["text"])


def _fill_bare(
    text: str, know: Callable[[re.Match[str]], str], variables: Mapping[str, str | None]
) -> str:
    def value(match: re.Match[str]) -> str:
        name = know(match)
        before = text[: match.start()]
        if before.count("[") > before.count("]"):
            return DURATION
        if name in _NUMBERS:
            return _NUMBERS[name]
        if name in _DURATIONS:
            return DURATION if before.rstrip().endswith("offset") else "300"
        chosen = variables.get(name)
        if chosen is not None and _PLAIN.fullmatch(chosen):
            return chosen
        return "instance" if re.search(r"\b(by|without|on|ignoring)\s*\([^)]*$", before) else "1"

    return _VARIABLE.sub(value, text)


def parse(expr: str) -> Any:
    """The tree of an expression without variables; NotPromqlError says what is wrong."""
    if not expr.strip():
        raise NotPromqlError("it is empty")
    if len(expr) > MOST_CHARS or sum(c in _NESTS for c in expr) > MOST_NESTING:
        raise NotPromqlError(
            f"it is longer or deeper than anybody could read ({len(expr)} characters)"
        )
    try:
        return promql_parser.parse(expr)
    except ValueError as error:
        raise NotPromqlError(" ".join(str(error).split())[:200]) from error
