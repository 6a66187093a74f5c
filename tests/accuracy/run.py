"""`make accuracy`: real faults on a real engine, and how often the account was right.

Writes build/accuracy.json and prints the table; --write-docs puts it into docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench import Injector
from campaign import Outcome, run
from faults.registry import ALL
from interference import in_process_of_its_own, section
from score import Score, score, table

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "build" / "accuracy.json"
DOCS = ROOT / "docs" / "accuracy.md"
SIZE_ERROR = 0.15  # from which on --wrong shows it
BEGIN, END = "<!-- table: written by make accuracy -->", "<!-- end of the table -->"


def today() -> int:
    """A seed that changes daily."""
    return int(datetime.now(UTC).strftime("%Y%m%d"))


def chosen(names: str | None) -> list[Injector]:
    if names is None:
        return list(ALL)
    known = {injector.fault.name: injector for injector in ALL}
    wanted = names.split(",")
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise SystemExit(
            f"error: no such fault: {', '.join(unknown)}; there are {', '.join(known)}"
        )
    return [known[name] for name in wanted]


def judged(outcome: Outcome, injectors: Sequence[Injector]) -> tuple[Score, dict[str, str]]:
    """The score, and what was not run and why: hurt nobody, or refused here."""
    result = score(outcome.cases, [injector.fault.name for injector in injectors])
    not_run = dict(outcome.not_run)
    hurt = {row.name for row in result.rows if row.requests}
    for injector in injectors:
        name = injector.fault.name
        if name not in hurt and name != "none" and name not in not_run:
            not_run[name] = "took a tenth of nobody's time, or strangers took more"
    return result, not_run


def wrong(outcome: Outcome) -> Iterator[str]:
    for case in outcome.cases:
        bad_size = case.size_error is not None and case.size_error > SIZE_ERROR
        if case.false_alarm or (
            case.affected and (not case.right or case.named is False or bad_size)
        ):
            what = "false alarm" if case.false_alarm else f"done {case.done_ns / 1e6:.0f} ms"
            said = f"said {case.said_ns / 1e6:.0f}"
            yield f"{case.fault}: {what}, {said}, right {case.right}, {case.detail}"


def write_docs(text: str) -> None:
    before, _, rest = DOCS.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=today())
    parser.add_argument("--faults", help="names, by commas (all)")
    parser.add_argument("--budget-s", type=float, default=1500, help="of injecting (1500)")
    parser.add_argument("--json", action="store_true", help="only the document, on stdout")
    parser.add_argument("--wrong", action="store_true", help="also the accounts that were wrong")
    parser.add_argument("--write-docs", action="store_true")
    arguments = parser.parse_args(argv)
    injectors = chosen(arguments.faults)
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {line}", file=sys.stderr, flush=True)

    outcome = run(injectors, seed=arguments.seed, budget_s=arguments.budget_s, say=say)
    result, not_run = judged(outcome, injectors)
    document = result.to_json(not_run)
    text = table(result, not_run)
    if arguments.faults is None:
        say("interference: prefills beside decodes, with and without")
        document["interference"] = in_process_of_its_own("--seed", str(arguments.seed))
        text += "\n\n" + section(document["interference"])
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document) if arguments.json else text)
    if arguments.wrong:
        print("\n".join(wrong(outcome)), file=sys.stderr)
    if arguments.write_docs:
        write_docs(f"Seed {arguments.seed}, {len(outcome.cases)} requests.\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
