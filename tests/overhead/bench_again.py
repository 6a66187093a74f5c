"""A recording of 1 million steps and 10 million kernel facts (made up, by a seeded generator)
attributed anew, and what takes the time.

    python tests/overhead/bench_again.py [--steps 1000000] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from synthetic_recording import write_recording

from dsagent.agent.again import attribute_again

BAR_S, BAR_BYTES = 60, 4 << 30
LOOK_S = 0.01  # of CPU time, between two looks at what runs
# The innermost of these functions on the stack says what for; the rest is "else".
STAGES = {
    "_polls": "reading Parquet",
    "Accountant.add": "cutting steps into pieces",
    "Accountant._join": "joining facts to pieces",
    "Accountant._learn": "learning what is normal",
    "CleanStepModel.price": "learning what is normal",
    "Accountant._account": "making accounts",
    "Norms.judge": "making accounts",
}


def attribute(folder: Path) -> dict[str, Any]:
    """In this process: the accounts are made, added up by cause, and let go."""
    began, cpu = time.monotonic(), time.process_time()
    causes: Counter[str] = Counter()
    stages: Counter[str] = Counter()
    accounts = 0

    def look(_signal: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_qualname not in STAGES:
            frame = frame.f_back
        stages["else" if frame is None else STAGES[frame.f_code.co_qualname]] += 1

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, LOOK_S, LOOK_S)
    for account in attribute_again(folder):
        accounts += 1
        for part in account.parts:
            causes[part.cause] += part.ns
        causes["unattributed"] += account.unattributed_ns
    signal.setitimer(signal.ITIMER_PROF, 0)
    whole = sum(causes.values())
    return {
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - cpu,
        "most_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "accounts": accounts,
        "ratios": {cause: ns / whole for cause, ns in causes.most_common()},
        "stages": {name: looks / stages.total() for name, looks in stages.most_common()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--attribute", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attribute:
        print(json.dumps(attribute(options.attribute)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = write_recording(Path(folder) / "made-up", options.steps, options.seed)
        print(f"made up: {rows}", file=sys.stderr)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
        # In a process of its own: its memory is what attributing takes, and nothing else.
        command = [sys.executable, __file__, "--attribute", str(Path(folder) / "made-up")]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    found |= {"rows": rows, "recording_bytes": size}
    if options.json:
        print(json.dumps({"again": found}))
        return
    print(
        f"{rows['steps']:,} steps, {rows['shares']:,} shares, {rows['kernel']:,} facts, "
        f"{rows['requests']:,} requests; {size / 1e6:.0f} MB of Parquet, synthetic"
    )
    print(
        f"attributed in {found['seconds']:.0f} s ({found['cpu_seconds']:.0f} s of one core, "
        f"{found['cpu_seconds'] / rows['steps'] * 1e6:.0f} µs a step), at most "
        f"{found['most_bytes'] / 1e9:.2f} GB resident; the bars are {BAR_S} s and 4 GB"
    )
    shown = ", ".join(f"{stage} {ratio:.0%}" for stage, ratio in found["stages"].items())
    print(f"of that: {shown}")
    shown = ", ".join(f"{cause} {ratio:.1%}" for cause, ratio in found["ratios"].items())
    print(f"{found['accounts']:,} accounts: {shown}")


if __name__ == "__main__":
    main()
