"""Runs every stage of the tests, whatever fails before, and closes with a table of stages.

Called by `make test` after the set-up. Exit code 0 only if every stage passed
and every stage of tests ran at least one.

Where tests need the machine's own schedule, up to three that failed are tried once more, from
their fixtures on, and named at the end: whoever finds a name there again has a test to mend.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTCOME = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)\b")
CLOSING_LINE = re.compile(r"^=*\s*\d+ (passed|failed|skipped|error).* in [\d.]+s")
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)")
SECOND_TRIES = 3  # more than that do not fail by chance
TESTS_FAILED = 1  # pytest's exit code


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    command: tuple[str, ...]
    limit_s: int
    is_pytest: bool = True
    is_live: bool = False  # another process, the kernel or the clock can make a test fail


@dataclass(slots=True)
class Outcome:
    name: str
    seconds: float
    exit_code: int
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    on_second_try: list[str] = field(default_factory=list)

    def summary(self) -> str:
        found = [f"{count} {what}" for what, count in self.counts.items()]
        if self.on_second_try:
            found.append(f"{len(self.on_second_try)} of them on a second try")
        return ", ".join(found)


PYTEST = (sys.executable, "-m", "pytest", "--durations=12")


STAGES = (
    Stage("check", ("bash", "scripts/check.sh"), 600, is_pytest=False),
    Stage("unit and golden", (*PYTEST, "tests/unit", "tests/golden", "tests/fuzz"), 900),
    Stage("live", (*PYTEST, "tests/live"), 2100, is_live=True),
    Stage("accuracy", (*PYTEST, "tests/accuracy"), 900, is_live=True),
    Stage(
        "uninstall check",
        (*PYTEST, "tests/soak", "--ignore=tests/soak/test_soak.py"),
        900,
        is_live=True,
    ),
    Stage("soak", (*PYTEST, "tests/soak/test_soak.py"), 1800, is_live=True),
    Stage("what containers need", ("bash", "scripts/setup_containers.sh"), 600, is_pytest=False),
    Stage(
        "containers",
        ("env", "DSAGENT_REQUIRE_CONTAINERS=1", *PYTEST, "tests/containers"),
        1200,
        is_live=True,
    ),
    Stage("vLLM's environment", ("bash", "scripts/setup_vllm.sh"), 1200, is_pytest=False),
    Stage(
        "vLLM",
        ("env", "DSAGENT_REQUIRE_VLLM=1", *PYTEST, "tests/vllm", "-m", "not nightly"),
        1500,
        is_live=True,
    ),
)


def run(stage: Stage) -> Outcome:
    outcome = run_once(stage)
    if not (stage.is_live and outcome.exit_code == TESTS_FAILED):
        return outcome
    if not 0 < len(outcome.failed) <= SECOND_TRIES:
        return outcome
    print(f"\n{stage.name}: a second try of what failed", flush=True)
    again = run_once(replace(stage, command=(*stage.command, "--last-failed")))
    outcome.seconds += again.seconds
    outcome.exit_code = again.exit_code
    outcome.counts = Counter(passed=outcome.counts["passed"], skipped=outcome.counts["skipped"])
    outcome.counts += again.counts
    if again.exit_code in (0, TESTS_FAILED):  # else nobody knows which would have passed
        outcome.on_second_try = sorted(set(outcome.failed) - set(again.failed))
    outcome.failed = again.failed
    return outcome


def run_once(stage: Stage) -> Outcome:
    """Runs one stage in a process group of its own, showing its output as it comes."""
    print(f"\n=== {stage.name}: {' '.join(stage.command[-3:])}", flush=True)
    begun = time.monotonic()
    process = subprocess.Popen(
        stage.command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    too_long = threading.Timer(stage.limit_s, os.killpg, (process.pid, signal.SIGKILL))
    too_long.start()
    closing_line = ""
    failed = []
    try:
        for raw in process.stdout:
            line = raw.decode(errors="replace")
            sys.stdout.write(line)
            sys.stdout.flush()
            if CLOSING_LINE.match(line):
                closing_line = line
            if stage.is_pytest and (failure := FAILURE.match(line)):
                failed.append(failure[1])
        exit_code = process.wait()
    finally:
        too_long.cancel()
        process.stdout.close()
    counts: Counter[str] = Counter()
    if stage.is_pytest:
        for count, what in OUTCOME.findall(closing_line):
            counts[what] += int(count)
        if exit_code == 0 and not counts["passed"]:
            print(f"{stage.name}: no test ran", flush=True)
            exit_code = 5
    seconds = time.monotonic() - begun
    if exit_code < 0 and seconds >= stage.limit_s:
        print(f"{stage.name}: ended after its limit of {stage.limit_s} s", flush=True)
    return Outcome(stage.name, seconds, exit_code, counts, failed)


def table(outcomes: list[Outcome]) -> str:
    rows = [("stage", "seconds", "result", "")]
    rows += [
        (o.name, f"{o.seconds:.0f}", "ok" if o.exit_code == 0 else "FAILED", o.summary())
        for o in outcomes
    ]
    rows.append(("total", f"{sum(o.seconds for o in outcomes):.0f}", "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--begun", type=int, help="when the set-up began, in Unix seconds")
    arguments = parser.parse_args()
    outcomes = []
    if arguments.begun is not None:
        outcomes.append(Outcome("set-up", time.time() - arguments.begun, 0))
    outcomes += [run(stage) for stage in STAGES]
    print(f"\n{table(outcomes)}\n")
    total: Counter[str] = Counter()
    for outcome in outcomes:
        total += outcome.counts
    failures = total["failed"] + total["error"] + total["errors"]
    print(f"tests: {total['passed']} passed, {failures} failed, {total['skipped']} skipped")
    for name in sorted(name for outcome in outcomes for name in outcome.on_second_try):
        print(f"only on a second try: {name}")
    return int(any(outcome.exit_code != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
