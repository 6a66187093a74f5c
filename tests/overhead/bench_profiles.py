"""What sampling stacks costs: CPU time of a look, how well a sample's time is known, and how much
slower the engine's steps get.

Beside it what the same costs by py-spy's other ways, which is why the agent does it this way.

    python tests/overhead/bench_profiles.py [--budget-s 120] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from bench_attach import STREAMS, slowdown
from clock_functions import SLICE_NS, SLICES

from dsagent.agent.facts import Target
from dsagent.agent.profiles.pace import MAX_RATE_HZ, RUN_S
from dsagent.agent.profiles.stacks import Recorded
from dsagent.agent.sources.py_spy import PySpySource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "accuracy"))
from lab import Engine, engine
from load import send, text

PY_SPY = str(Path(sys.executable).with_name("py-spy"))
CLOCK = str(Path(__file__).with_name("clock_functions.py"))
RUNS = 3


@contextmanager
def loaded(target: Engine) -> Iterator[None]:
    stop = threading.Event()

    def stream(seed: int) -> None:
        dice = Random(seed)
        while not stop.is_set():
            send(target, text(dice, 8), 400, dice)

    for seed in range(STREAMS):
        threading.Thread(target=stream, args=(seed,), daemon=True).start()
    time.sleep(2.0)
    yield
    stop.set()


def cpu_ns(*argv: str) -> int:
    """CPU time of the command, from its start to its end."""
    process = subprocess.Popen(
        [PY_SPY, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, argv
    return round((used.ru_utime + used.ru_stime) * 1e9)


def prices(pid: int) -> dict[str, float]:
    """ns of CPU: to start, for each look of a run, and for one look by `dump`."""
    fixed = ("record", "--nonblocking", "--threads", "--format", "chrometrace")
    at = {
        rate: statistics.median(
            cpu_ns(*fixed, "-r", str(rate), "-d", "5", "-o", "/dev/null", "-p", str(pid))
            for _ in range(RUNS)
        )
        for rate in (5, 50)
    }
    look_ns = (at[50] - at[5]) / (45 * 5)
    dumps = [cpu_ns("dump", "--nonblocking", "--json", "--pid", str(pid)) for _ in range(10)]
    return {
        "start_ns": at[5] - look_ns * 25,
        "look_ns": look_ns,
        "dump_ns": statistics.median(dumps),
    }


def runs_of(pid: int, count: int) -> list[Recorded]:
    """By the source itself, with all the room it could use."""
    target = Target(pid, 0, 0, "", (), "reference")
    source = PySpySource(target, lambda: (pid,), 1.0)
    source.start()
    found: list[Recorded] = []
    deadline = time.monotonic() + 3 * count * RUN_S
    try:
        while len(found) < count and time.monotonic() < deadline:
            found += source.poll(time.monotonic_ns()).profiles
            time.sleep(0.05)
    finally:
        source.stop()
    return found


def time_errors_ms() -> list[float]:
    """Of samples of a target whose stack tells the time: how far off their times are."""
    with subprocess.Popen([sys.executable, CLOCK], stdout=subprocess.PIPE, text=True) as clock:
        try:
            assert clock.stdout is not None and clock.stdout.readline() == "ready\n"
            runs = runs_of(clock.pid, 2)
        finally:
            clock.kill()
    errors = []
    for run in runs:
        for seen in run.seen:
            name = seen.frames[-1].function
            if name.startswith("at_"):
                middle_ns = int(name[3:]) * SLICE_NS + SLICE_NS // 2
                whole_ns = SLICES * SLICE_NS
                off_ns = (seen.at_ns - middle_ns + whole_ns // 2) % whole_ns - whole_ns // 2
                errors.append(off_ns / 1e6)
    return sorted(errors)


@contextmanager
def sampled(pid: int) -> Iterator[None]:
    with subprocess.Popen(
        [
            *(PY_SPY, "record", "--nonblocking", "--threads", "--format", "chrometrace"),
            *("-r", str(MAX_RATE_HZ), "-d", "60", "-o", "/dev/null", "-p", str(pid)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--budget-s", type=float, default=120.0, help="for the slowdown")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    errors = time_errors_ms()
    with engine("smollm2") as target, loaded(target):
        price = prices(target.pid)
        seen = runs_of(target.pid, 1)[0]
    with engine("smollm2") as target:
        slower = slowdown(target, options.budget_s, sampled)
    figures: dict[str, Any] = {
        "price": price,
        "time_error_ms": {
            "median": statistics.median(errors),
            "p5": errors[len(errors) // 20],
            "p95": errors[len(errors) * 19 // 20],
            "samples": len(errors),
        },
        "changes": len(seen.seen),
        "repeats": seen.repeats,
        "slowdown": slower,
    }
    if options.json:
        print(json.dumps(figures))
        return
    error = figures["time_error_ms"]
    run_ns = price["start_ns"] + price["look_ns"] * MAX_RATE_HZ * RUN_S
    print(
        f"py-spy's CPU time: {price['start_ns'] / 1e6:.0f} ms to start, "
        f"{price['look_ns'] / 1e6:.2f} ms a look; at {MAX_RATE_HZ} looks a second "
        f"{run_ns / RUN_S / 1e9:.2%} of one core. One look by `dump`: "
        f"{price['dump_ns'] / 1e6:.1f} ms"
    )
    print(
        f"a sample's time is off by {error['median']:+.1f} ms at the median, "
        f"{error['p5']:+.1f} to {error['p95']:+.1f} ms for nine of ten "
        f"({error['samples']} samples; ± 2.5 ms of it are the clock's own)"
    )
    print(
        f"a run of {RUN_S} s on smollm2: {figures['changes']} samples with their times, "
        f"{figures['repeats']} repeats"
    )
    if slower["slowdown_ratio"] is None or slower["half_width_ratio"] is None:
        print("slowdown: too few steps")
        return
    print(
        f"slowdown of the engine's steps at {MAX_RATE_HZ} looks a second: "
        f"{slower['slowdown_ratio']:+.2%} ± {slower['half_width_ratio']:.2%} "
        f"({slower['pairs']} pairs of blocks"
        f"{'' if slower['resolved'] else '; not resolved to ± 0.5 %'})"
    )


if __name__ == "__main__":
    main()
