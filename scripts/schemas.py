"""Writes the generated end of docs/schemas.md: the tables of a recording."""

from __future__ import annotations

from pathlib import Path

from dsagent.agent.sinks.schema import document

MARKER = "<!-- generated from agent/sinks/schema.py by scripts/schemas.py -->\n"
PATH = Path(__file__).resolve().parents[1] / "docs" / "schemas.md"


def updated(text: str) -> str:
    """The document with its generated end made anew."""
    return f"{text.partition(MARKER)[0]}{MARKER}\n{document()}"


if __name__ == "__main__":
    PATH.write_text(updated(PATH.read_text(encoding="utf-8")), encoding="utf-8")
