"""Each claim of the threat model names tests, and each of them is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/threat_model.md"
NAMED = re.compile(r"`(test_\w+)::(test_\w+)`")


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_bytes()))
        if type(node) is ast.FunctionDef
    }


def claims() -> list[tuple[str, str]]:
    """(claim, tests) of each row of the tables that have these two columns."""
    rows, in_claims = [], False
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            in_claims = False
        elif line == "| claim | test |":
            in_claims = True
        elif in_claims and not line.startswith("|---"):
            _, claim, tests, _ = line.split("|")
            rows.append((claim.strip(), tests))
    return rows


def test_every_claim_names_a_test_and_every_test_named_is_there() -> None:
    files = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(claims()) >= 40
    for claim, tests in claims():
        named = NAMED.findall(tests)
        assert named, f"no test: {claim}"
        for file, function in named:
            assert file in files, f"no such file: {file}"
            assert function in functions(files[file]), f"no such test: {file}::{function}"


def test_no_test_is_named_outside_of_the_claims() -> None:
    inside = sum(len(NAMED.findall(tests)) for _, tests in claims())
    assert inside == len(NAMED.findall(PAGE.read_text()))
