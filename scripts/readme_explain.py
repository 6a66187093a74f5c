"""Puts the real output of `dsagent demo` into the README, between its two markers.

The demo ends with the accounts of one or two requests; the README shows the
last of them. Nothing in that block is written by hand.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- explain:begin -->", "<!-- explain:end -->"
COLUMNS = "100"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def demo_output() -> str:
    ran = subprocess.run(
        [str(ROOT / ".venv" / "bin" / "dsagent"), "demo", *sys.argv[1:]],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1", "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ESCAPES.sub("", ran.stdout)


def explained(output: str) -> str:
    """The last account in the demo's output, from its title on."""
    lines = [line.rstrip() for line in output.splitlines()]
    traces = [n for n, line in enumerate(lines) if re.match(r"trace +[0-9a-f]{32}$", line)]
    if not traces:
        raise SystemExit("readme_explain: the demo's output explains no request")
    return "\n".join(lines[traces[-1] - 1 :]).strip()


def main() -> int:
    text = README.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"readme_explain: README.md has no {BEGIN} and {END}")
    block = f"\n```console\n$ dsagent demo\n...\n{explained(demo_output())}\n```\n"
    README.write_text(before + BEGIN + block + END + after)
    print("readme_explain: README.md shows the explanation of a request served just now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
