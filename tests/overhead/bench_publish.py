"""What publishing one step costs the engine's loop, Python's building of the record included.

From the engine's own StepReport through the observer into shared memory: all
that the loop pays for being watched, save two stores when a step starts. A
benchmark, not a test: figures of a shared machine decide nothing.

    python tests/overhead/bench_publish.py [--steps N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from dsagent.engine.observe import ADMITTED, StepReport, StepShare
from dsagent.instrumentation.reference import ReferenceObserver

BATCHES = (1, 16, 64)
BAR_US = 20.0  # at batch 64


def measure(batch: int, steps: int) -> dict[str, float]:
    """Microseconds a step. The batch's requests change as they do under load: one in, one out."""
    observer = ReferenceObserver(engine_id=1)
    ids = [f"chatcmpl-{number:032x}" for number in range(batch + steps)]
    costs_ns: list[int] = []
    try:
        for step_id in range(1, steps + 1):
            first = step_id // 8  # a request comes and one goes every 8 steps
            report = StepReport(
                step_id, 1_000, 30_000_000, 100_000, 50_000, 29_000_000, 300_000, 100_000,
                0, batch, 3, batch, 0, batch * 8, 4_096, ADMITTED, False,
                [StepShare(id_, False, 1, 0, 300, 1, False) for id_ in ids[first : first + batch]],
            )  # fmt: skip
            before_ns = time.perf_counter_ns()
            observer.step_finished(report)
            costs_ns.append(time.perf_counter_ns() - before_ns)
    finally:
        observer.close()
    ordered = sorted(costs_ns)
    return {
        "batch": batch,
        "min_us": ordered[0] / 1e3,
        "median_us": statistics.median(ordered) / 1e3,
        "p99_us": ordered[len(ordered) * 99 // 100] / 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    results = [measure(batch, arguments.steps) for batch in BATCHES]
    if arguments.json:
        print(json.dumps({"publish": results, "bar_us": BAR_US, "steps": arguments.steps}))
        return 0
    print(f"{'batch':>5}  {'min µs':>8}  {'median µs':>9}  {'p99 µs':>8}")
    for result in results:
        print(
            f"{result['batch']:>5}  {result['min_us']:>8.1f}  {result['median_us']:>9.1f}"
            f"  {result['p99_us']:>8.1f}"
        )
    print(f"bar: {BAR_US:.0f} µs at batch 64")
    return 0


if __name__ == "__main__":
    sys.exit(main())
