"""Runs every tests/overhead/bench_*.py and writes their tables into docs/benchmarks.md.

Figures come from here, never from a timed test. With --json: nothing is
written, and one JSON document goes to stdout. Names given as arguments (such
as `join`) choose among the benchmarks; then, too, nothing is written, unless
--write asks for their sections of the page.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
LIMIT_S = (
    1800  # of one benchmark: the longest runs until its interval is narrow, 15 minutes at most
)


def first_line(path: Path, pattern: str, otherwise: str) -> str:
    """The first match's group in a file of /proc or /etc."""
    found = re.search(pattern, path.read_text(), re.MULTILINE) if path.exists() else None
    return found.group(1).strip() if found else otherwise


def machine() -> dict[str, str]:
    """What the figures depend on."""
    memory_kib = int(first_line(Path("/proc/meminfo"), r"^MemTotal:\s+(\d+) kB", "0"))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "processor": first_line(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$", "unknown"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_kib / 2**20:.0f} GiB",
        "system": first_line(Path("/etc/os-release"), r'^PRETTY_NAME="?([^"\n]+)', "unknown"),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "torch": metadata.version("torch"),
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def title(path: Path) -> str:
    """The first paragraph of the script's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or path.stem
    return " ".join(text.split("\n\n", 1)[0].split())


def run(path: Path, *options: str) -> tuple[int, str]:
    """Exit code and stdout; stderr (progress) goes to the terminal."""
    print(f"bench: {path.stem} ...", file=sys.stderr, flush=True)
    begun = time.monotonic()
    try:
        ran = subprocess.run(
            [sys.executable, str(path), *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        code, output = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired:
        code, output = 124, f"not finished after {LIMIT_S} s"
    took = time.monotonic() - begun
    print(f"bench: {path.stem}: exit {code} after {took:.0f} s", file=sys.stderr, flush=True)
    return code, output


def section(path: Path, code: int, output: str) -> str:
    lines = [f"## {title(path)}", "", f"`{path.relative_to(ROOT)}`", ""]
    if code:
        lines += [f"**It failed with exit code {code}; what it printed proves nothing.**", ""]
    return "\n".join([*lines, "```", output.strip(), "```"])


def kept(names: set[str]) -> dict[str, str]:
    """The page's sections of the benchmarks that are not run anew, by script."""
    text = PAGE.read_text() if PAGE.exists() else ""
    found = {}
    for part in text.split("\n## ")[1:]:
        script = re.search(r"^`(tests/overhead/bench_(\w+)\.py)`$", part, re.MULTILINE)
        if script and script[2] not in names and (ROOT / script[1]).exists():
            found[script[1]] = "## " + part.strip()
    return found


def page(facts: dict[str, str], results: list[tuple[Path, int, str]]) -> str:
    sections = kept({path.stem.removeprefix("bench_") for path, _, _ in results})
    for path, code, output in results:
        sections[str(path.relative_to(ROOT))] = section(path, code, output)
    head = [
        "# Benchmarks",
        "",
        "Written by `make bench`; not edited by hand. What is compared is compared side by side,",
        "in one run: figures of different machines or days are not comparable. Commit and date are",
        "those of the section that was measured last.",
        "",
        "| machine | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
    ]
    return "\n\n".join(["\n".join(head), *(sections[name] for name in sorted(sections))]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="benchmarks, without bench_ and .py; default: all")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--write", action="store_true", help="of those named, the page's sections")
    arguments = parser.parse_args()
    scripts = sorted((ROOT / "tests" / "overhead").glob("bench_*.py"))
    known = {path.stem.removeprefix("bench_"): path for path in scripts}
    unknown = sorted(set(arguments.names) - set(known))
    if unknown or not known:
        print(f"bench: no benchmark {', '.join(unknown)}; there are: {', '.join(known)}")
        return 2
    chosen = [known[name] for name in arguments.names] or scripts
    options = ("--json",) if arguments.json else ()
    results = [(path, *run(path, *options)) for path in chosen]
    if arguments.json:
        measured = {path.stem: json.loads(output) for path, code, output in results if not code}
        print(json.dumps({"machine": machine(), "results": measured}))
    elif arguments.names and not arguments.write:
        for _, _, output in results:
            print(output)
    else:
        PAGE.write_text(page(machine(), results))
        print(f"bench: written to {PAGE.relative_to(ROOT)}")
    return int(any(code for _, code, _ in results))


if __name__ == "__main__":
    sys.exit(main())
