"""What the sidecar costs: with nothing to watch, and with one to three engines that idle or serve,
beside one `dsagent attach` for each of them.

A benchmark, not a test. The engines are those of the tests: real rings, no model.

    python tests/overhead/bench_sidecar.py [--json | --write]

`--write` puts the table into docs/sidecar.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live" / "shell"))

from shell_lab import Agent, Child, Engine
from sidecar_lab import Lab

from dsagent.agent.host import procfs

SPAN_S = 15.0
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sidecar.md"
BEGIN, END = "<!-- tests/overhead/bench_sidecar.py --write -->\n", "<!-- end -->\n"


@dataclass(frozen=True, slots=True)
class Row:
    """Of all processes of the agent together."""

    what: str
    engines: int
    steps_per_s: float
    cpu_ratio: float  # of one core
    pss_bytes: int


def cpu_ns(pids: Sequence[int]) -> int:
    total = 0
    for pid in pids:
        stat = procfs.read_stat(pid)
        total += stat.user_ns + stat.system_ns
    return total


def measured(what: str, agents: Sequence[Child], engines: Sequence[Engine], *, load: bool) -> Row:
    with serving(engines if load else ()) as steps:
        time.sleep(3.0)  # attached, and past its first work
        pids = [agent.pid for agent in agents]
        began_s, before_ns, steps_before = time.monotonic(), cpu_ns(pids), steps[0]
        time.sleep(SPAN_S)
        elapsed_s = time.monotonic() - began_s
        return Row(
            what,
            len(engines),
            (steps[0] - steps_before) / elapsed_s,
            (cpu_ns(pids) - before_ns) / 1e9 / elapsed_s,
            sum(procfs.pss_bytes(pid) or 0 for pid in pids),
        )


@contextlib.contextmanager
def serving(engines: Sequence[Engine]) -> Iterator[list[int]]:
    """Requests one after the other to each engine; counts the steps, six a request."""
    steps, stop = [0], threading.Event()

    def serve(engine: Engine) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            engine.do(f"request r{number}")
            steps[0] += 6

    threads = [threading.Thread(target=serve, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    try:
        yield steps
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def rows() -> Iterator[Row]:
    lab = Lab(f"bench-{os.getpid()}")
    with lab.sidecar() as sidecar:
        yield measured("sidecar, nothing to watch", [sidecar], [], load=False)
        with contextlib.ExitStack() as stack:
            engines: list[Engine] = []
            for _ in range(3):
                engine = stack.enter_context(lab.engine(step_ms=20.0))
                engines.append(engine)
                sidecar.watching(engine.pid)
                if len(engines) != 2:
                    yield measured("sidecar, idle", [sidecar], engines, load=False)
                    yield measured("sidecar, serving", [sidecar], engines, load=True)
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(lab.engine(step_ms=20.0)) for _ in range(3)]
        agents = [stack.enter_context(Agent(engine.pid)).attached() for engine in engines]
        yield measured("three agents, serving", agents, engines, load=True)
        for agent in agents:
            agent.process.terminate()


def table(found: Sequence[Row]) -> str:
    lines = [
        f"Machine load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, "
        f"{len(procfs.parents())} processes in /proc.",
        "",
        "| | engines | steps/s | CPU, of one core | memory (PSS) |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.what} | {row.engines} | {row.steps_per_s:.0f} | {row.cpu_ratio:.1%} "
        f"| {row.pss_bytes / 1e6:.0f} MB |"
        for row in found
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = list(rows())
    if arguments.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
        return
    print(table(found))
    if arguments.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(head + BEGIN + table(found) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
