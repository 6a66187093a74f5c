"""Puts what a run printed into its place on docs/soak.md."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "soak.md"


def write(script: str, name: str, printed: str, page: Path = PAGE) -> None:
    """Between the marks of that name. Raises ValueError where the page does not have them."""
    begin, end = f"<!-- tests/soak/{script} --write -->\n", f"<!-- end {name} -->\n"
    text = page.read_text()
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{page} has no {begin.strip()} with its end")
    page.write_text(f"{head}{begin}{printed}\n{end}{tail}")
