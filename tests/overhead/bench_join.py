"""Kernel facts joined to steps, a second and core, as the agent does it on line.

python tests/overhead/bench_join.py [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from dsagent.agent.attribution.join import Joiner, Watched
from dsagent.agent.attribution.pieces import cut
from dsagent.agent.facts import FACT_DTYPE, Facts, Kind
from dsagent.instrumentation.records import Admission, Phase, Share, Step

STEP_NS = 20_000_000


def make_steps(count: int) -> list[Step]:
    shares = tuple(Share(key, Phase.DECODE, 1, 0, 100, 1, False) for key in range(1, 17))
    return [
        Step(
            1, i + 1, 10, 11, i * STEP_NS, (i + 1) * STEP_NS - 10_000,
            200_000, 100_000, STEP_NS - 500_000, 100_000, 50_000,
            0, 16, 0, 16, 0, 16, 1000, Admission.ADMITTED, False, shares,
        )
        for i in range(count)
    ]  # fmt: skip


def make_facts(count: int, steps: int) -> Facts:
    dice = np.random.default_rng(7)
    facts = np.zeros(count, FACT_DTYPE)
    facts["kind"] = dice.choice([Kind.RUNQUEUE, Kind.OFF_FUTEX, Kind.ONCPU, Kind.FOREIGN], count)
    facts["exact"] = facts["kind"] <= Kind.OFF_OTHER
    facts["pid"], facts["culprit_pid"] = 10, 500
    facts["tid"] = dice.integers(11, 30, count)
    facts["start_ns"] = np.sort(dice.integers(0, steps * STEP_NS, count))
    facts["ns"] = dice.integers(1_000, 400_000, count)
    facts["end_ns"] = facts["start_ns"] + facts["ns"]
    facts["step_id"] = facts["end_ns"] // STEP_NS + 1
    return facts


def run(steps: list[Step], facts: Facts) -> float:
    """Seconds for cutting the steps, indexing the facts and joining both."""
    began = time.perf_counter()
    joiner = Joiner(facts, Watched(10, 11, frozenset({11, 12})))
    for i, step in enumerate(steps):
        joiner.join(cut(step, steps[i - 1].end_ns if i else None))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for facts_per_step in (100, 1000, 10_000):
        count = 1_000_000
        steps = make_steps(count // facts_per_step)
        facts = make_facts(count, len(steps))
        rates = sorted(count / run(steps, facts) for _ in range(3))
        rows.append(
            {
                "facts_per_step": facts_per_step,
                "facts_per_second": round(statistics.median(rates)),
                "least": round(rates[0]),
                "most": round(rates[-1]),
            }
        )
    if options.json:
        print(json.dumps({"join": rows}))
        return
    print("join of kernel facts to steps, one core (median of 3, least to most)")
    for row in rows:
        print(
            f"  {row['facts_per_step']:>6} facts a step: {row['facts_per_second'] / 1e6:.2f} M/s "
            f"({row['least'] / 1e6:.2f} to {row['most'] / 1e6:.2f})"
        )


if __name__ == "__main__":
    main()
