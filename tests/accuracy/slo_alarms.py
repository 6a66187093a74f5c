"""How soon the agent's evaluator alarms, and how often for nothing, in simulated time: requests of
a service that keeps exactly to its objective, by chance, and of one that stops keeping to it after
five good minutes. `python tests/accuracy/slo_alarms.py` prints docs/slo.md's two tables.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "slo"))

from made import MS
from slo_watch import SEES, request

from dsagent.agent.slo.evaluator import Evaluator
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Limit, Limits
from dsagent.agent.slo.window import S

DAYS = 3
CALM_S, DAY_S = 300, 86400
TICK_S = 0.2  # as the agent does
RATES = (0.2, 1.0, 5.0)  # requests a second
OBJECTIVES = (0.95, 0.99, 0.999)
SLOWER = (1, 3)  # a slow service is asked less: so many times
LONGEST_S = 600.0
GOOD, BAD = request(), request(bad=True)


def evaluator(objective: float) -> Evaluator:
    return Evaluator(SloFile(Limits((Limit("*", ttft_ns=500 * MS, objective_ratio=objective),))))


def arrivals(dice: random.Random, rate: float, length_s: float) -> Iterator[float]:
    """Seconds, at random."""
    at_s = dice.expovariate(rate)
    while at_s < length_s:
        yield at_s
        at_s += dice.expovariate(rate)


def false_alarms(objective: float, rate: float, days: float = DAYS, seed: int = 1) -> Counter[str]:
    """Alarms by severity, and the requests, of a service that keeps to its objective exactly."""
    dice, judge = random.Random(seed), evaluator(objective)
    found: Counter[str] = Counter()
    for at_s in arrivals(dice, rate, days * DAY_S):
        bad = dice.random() < 1 - objective
        alerts, _ = judge.take((BAD if bad else GOOD,), SEES, round((DAY_S + at_s) * S))
        found["requests"] += 1
        found.update(a.labels["severity"] for a in alerts if a.state == "burning")
    return found


@dataclass(frozen=True, slots=True)
class Delay:
    """From the moment at which every request becomes bad to the page; None: none came."""

    median_s: float | None
    worst_s: float | None


def delay(objective: float, rate: float, slower: int, tries: int = 21) -> Delay:
    found = sorted(_delay(objective, rate, slower, seed) or LONGEST_S for seed in range(tries))
    if found[-1] >= LONGEST_S:
        return Delay(None if found[tries // 2] >= LONGEST_S else found[tries // 2], None)
    return Delay(found[tries // 2], found[-1])


def _delay(objective: float, rate: float, slower: int, seed: int) -> float | None:
    dice, judge = random.Random(seed), evaluator(objective)
    for at_s in arrivals(dice, rate, CALM_S):
        judge.take((GOOD,), SEES, round((DAY_S + at_s) * S))
    begun_s = DAY_S + CALM_S
    pending = arrivals(dice, rate / slower, LONGEST_S)
    next_s = next(pending, LONGEST_S)
    for tick in range(round(LONGEST_S / TICK_S)):
        now_s = tick * TICK_S
        came = 0
        while next_s <= now_s:
            came, next_s = came + 1, next(pending, LONGEST_S + 1)
        alerts, _ = judge.take((BAD,) * came, SEES, round((begun_s + now_s) * S))
        if any(alert.labels["severity"] == "page" for alert in alerts):
            return now_s
    return None


def main() -> None:
    print(
        "| objective | requests a second | from the first bad moment to the page: median, worst |"
    )
    print("|---|---|---|")
    for objective in OBJECTIVES:
        for rate in RATES:
            for slower in SLOWER:
                found = delay(objective, rate, slower)
                texts = [
                    "-" if s is None else f"{s:.1f} s" for s in (found.median_s, found.worst_s)
                ]
                note = f" (then {rate / slower:.2g})" if slower > 1 else ""
                print(f"| {objective:.1%} | {rate:g}{note} | {', '.join(texts)} |", flush=True)
    print(f"\n| objective | requests a second | in {DAYS} days: requests | pages | tickets |")
    print("|---|---|---|---|---|")
    for objective in OBJECTIVES:
        for rate in RATES[:2]:
            found_alarms = false_alarms(objective, rate)
            counts = " | ".join(str(found_alarms[k]) for k in ("requests", "page", "ticket"))
            print(f"| {objective:.1%} | {rate:g} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
