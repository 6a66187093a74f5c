"""How often to look, so that looking costs no more than it may. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RATE_HZ = 20  # at this rate py-spy's cost to a target is within noise
RUN_S = 10
MAX_RUN_SHARE = 0.5  # of --max-overhead: the rest is for what accounts are made of
MAX_PAUSE_S = 600.0
# What is taken until a run has been measured (docs/profiles.md).
FIRST_START_NS = 60_000_000
FIRST_SAMPLE_NS = 1_500_000


@dataclass(frozen=True, slots=True)
class Plan:
    """The next run, after so long a pause."""

    rate_hz: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Price:
    """CPU time that a run takes: to start, and for each time that it looks."""

    start_ns: float = FIRST_START_NS
    look_ns: float = FIRST_SAMPLE_NS

    def run_ns(self, rate_hz: int) -> float:
        return self.start_ns + self.look_ns * rate_hz * RUN_S

    def learn(self, rate_hz: int, cpu_ns: int) -> Price:
        """Moves towards what a run has taken, both parts alike: one figure tells no more."""
        by = 1 + 0.5 * (cpu_ns / self.run_ns(rate_hz) - 1)
        by = min(max(by, 0.1), 10.0)
        return Price(self.start_ns * by, self.look_ns * by)


def plan(price: Price, allowed_ratio: float, cpus: int) -> Plan | None:
    """`allowed_ratio`: of the target's CPUs, what sampling may take. None where even one run in
    ten minutes, at one look a second, is too much."""
    allowed_ns_per_s = max(0.0, allowed_ratio) * cpus * 1e9
    whole_ns = allowed_ns_per_s * RUN_S
    rate_hz = int((whole_ns - price.start_ns) / (price.look_ns * RUN_S))
    if rate_hz >= 5:
        return Plan(min(rate_hz, MAX_RATE_HZ), 0.0)
    if not allowed_ns_per_s:
        return None
    pause_s = price.run_ns(5) / allowed_ns_per_s - RUN_S  # rarer runs rather than thin ones
    return Plan(5, pause_s) if pause_s <= MAX_PAUSE_S else None


def pause_after(cpu_ns: int, allowed_ratio: float, cpus: int) -> float:
    """Seconds until so much that was taken for nothing is within what may be taken."""
    allowed_ns_per_s = max(0.0, allowed_ratio) * cpus * 1e9
    return min(MAX_PAUSE_S, cpu_ns / allowed_ns_per_s) if allowed_ns_per_s else MAX_PAUSE_S


def allowance(
    max_ratio: float, seen_ratio: float, own_ratio: float, beside_ratio: float = 0.0
) -> float:
    """What is left of --max-overhead when all but this sampler is paid, and at most half of it for
    all samplers. `seen_ratio`: what watching costs in all, as last measured, with `own_ratio` for
    this sampler and `beside_ratio` for the others."""
    others = max(0.0, seen_ratio - own_ratio)
    return max(0.0, min(MAX_RUN_SHARE * max_ratio - beside_ratio, max_ratio - others))


def is_paid(cpu_ns: int, allowed_ratio: float, cpus: int, elapsed_ns: int) -> bool:
    """Whether what a run has taken, spread over the time since it began, is within what may be
    taken: then another may begin."""
    return cpu_ns <= allowed_ratio * cpus * elapsed_ns
