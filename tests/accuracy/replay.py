"""Recorded facts, and what they are to be attributed to: the same, exactly, ever again.

`python tests/accuracy/replay.py --record` makes a new recording on a real engine under
real faults, in place of the old one; `--restate` keeps the recorded facts and stores what
they are attributed to now, for a change of the attribution that is meant.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.facts import FACT_DTYPE, Kind, Readings
from dsagent.agent.host.target import resolve_starting
from dsagent.agent.session.feeds import Feeds
from dsagent.instrumentation.records import (
    Admission,
    Phase,
    RequestOpen,
    RequestRecord,
    Share,
    Step,
)

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
FACTS, ATTRIBUTION = FIXTURES / "recorded_facts.jsonl.gz", FIXTURES / "attribution.json.gz"
TICK_S = 0.2
LEAST_FOREIGN_NS = 1_000_000  # shorter turns of strangers are left out, to keep it small


def attributed(lines: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The accounts that the recorded polls lead to, in the order they were made."""
    head = next(lines)
    accountant = Accountant(head["attached_ns"])
    accounts = []
    for poll in lines:
        for readings in poll["readings"]:
            accountant.add(_readings(readings))
        accounts += accountant.due(poll["now_ns"])
    return [account.to_json() for account in accounts]


def recorded() -> Iterator[dict[str, Any]]:
    with gzip.open(FACTS, "rt") as file:
        yield from map(json.loads, file)


def stored() -> list[dict[str, Any]]:
    accounts: list[dict[str, Any]] = json.loads(gzip.decompress(ATTRIBUTION.read_bytes()))
    return accounts


def restate() -> int:
    """Stores what the recorded facts are attributed to now; how many accounts."""
    accounts = attributed(recorded())
    _write(ATTRIBUTION, json.dumps(accounts, indent=0).encode())
    return len(accounts)


def record() -> None:
    """Three faults of known kinds on a real engine, seen by the agent's own sources."""
    from campaign import ENGINES, warm
    from faults.cpu import run_hogs
    from faults.stops import stop_for
    from lab import engine
    from load import Load, send, text

    dice = random.Random(3)
    lines: list[dict[str, Any]] = []
    model, flags, _ = ENGINES["smollm2"]
    with engine(model, *flags) as target:
        feeds = Feeds(resolve_starting(target.pid, lambda _line: None))
        feeds.start()
        lines.append({"attached_ns": time.monotonic_ns()})
        try:
            with Load(target, clients=4, max_tokens=(8, 16), seed=3) as load, _Ticks(feeds, lines):
                warm(target, load, dice)
                stop_for(target, 0.25)
                load.wait_for(4)
                run_hogs(os.sched_getaffinity(target.pid), 1.0, 0)
                load.wait_for(4)
                send(target, text(dice, 300), 2, dice)
                load.wait_for(4)
        finally:
            feeds.stop()
    _write(FACTS, "".join(json.dumps(line) + "\n" for line in lines).encode())


class _Ticks:
    """Polls the sources as a session does, in a thread that alone touches them."""

    def __init__(self, feeds: Feeds, lines: list[dict[str, Any]]) -> None:
        self._feeds, self._lines = feeds, lines
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        time.sleep(2 * TICK_S)  # the last requests' facts
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            now_ns = time.monotonic_ns()
            brought = [_document(readings) for readings in self._feeds.poll(now_ns)]
            self._lines.append({"now_ns": now_ns, "readings": brought})


def _document(readings: Readings) -> dict[str, Any]:
    facts = readings.facts
    little = (facts["kind"] == Kind.FOREIGN) & (facts["ns"] < LEAST_FOREIGN_NS)
    facts = facts[~little]
    return {
        "steps": [
            {**asdict(step), "shares": [share._asdict() for share in step.shares]}
            for step in readings.steps
        ],
        "opened": [asdict(opened) for opened in readings.opened],
        "closed": [asdict(closed) for closed in readings.closed],
        "facts": base64.b64encode(facts.tobytes()).decode(),
        "facts_complete_ns": readings.facts_complete_ns,
        "names": readings.names,
    }


def _readings(document: dict[str, Any]) -> Readings:
    return Readings(
        steps=[_step(step) for step in document["steps"]],
        opened=[RequestOpen(**opened) for opened in document["opened"]],
        closed=[RequestRecord(**closed) for closed in document["closed"]],
        facts=np.frombuffer(base64.b64decode(document["facts"]), FACT_DTYPE),
        facts_complete_ns=document["facts_complete_ns"],
        names={int(number): name for number, name in document["names"].items()},
    )


def _step(document: dict[str, Any]) -> Step:
    shares = tuple(
        Share(**{**share, "phase": Phase(share["phase"])}) for share in document["shares"]
    )
    admission = Admission(document["admission"])
    return Step(**{**document, "shares": shares, "admission": admission})


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(gzip.compress(content, mtime=0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--record", action="store_true", help="in place of the facts that are there")
    which.add_argument("--restate", action="store_true", help="keep the facts")
    if parser.parse_args().record:
        record()
    print(f"{restate()} accounts stored; facts {FACTS.stat().st_size >> 10} KiB, ", end="")
    print(f"attribution {ATTRIBUTION.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
