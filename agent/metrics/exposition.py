"""Prometheus' text format, as much of it as counts and gauges need. Pure.

What is read was written by another process: lines that make no sense are left
out, and no more than `MOST_LINES` looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass

MOST_LINES = 200_000
MOST_LINE_CHARS = 8192

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|$)')


@dataclass(frozen=True, slots=True)
class Scraped:
    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str, wanted: Container[str]) -> list[Scraped]:
    """The samples of the names wanted, in the order in which they stand there."""
    found = []
    for line in text.splitlines()[:MOST_LINES]:
        if len(line) > MOST_LINE_CHARS or line.startswith("#"):
            continue
        name = _NAME.match(line)
        if name is None or name.group() not in wanted:
            continue
        sample = _sample(name.group(), line[name.end() :])
        if sample is not None:
            found.append(sample)
    return found


def _sample(name: str, rest: str) -> Scraped | None:
    labels: dict[str, str] = {}
    if rest.startswith("{"):
        inside, brace, rest = rest[1:].rpartition("}")
        if not brace:
            return None
        at = 0
        while at < len(inside) and inside[at:].strip():
            label = _LABEL.match(inside, at)
            if label is None:
                return None
            labels[label.group(1)] = label.group(2)
            at = label.end()
    words = rest.split()
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        return None
    return Scraped(name, labels, value) if math.isfinite(value) else None
