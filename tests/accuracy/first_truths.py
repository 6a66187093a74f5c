"""The first three truths, of any engine: for requests that a known fault hit, the top cause is
that fault.

One engine on real weights, one agent, three injections under load. The injector's own
clock says which requests were hit; the agent is not asked.
"""

from __future__ import annotations

import math
import os
import random
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.cpu import HOG, run_hogs
from lab import Engine, Observed, agent
from load import Load, send, text
from truth import KernelAccounts, Timeline

from dsagent.agent.attribution.account import Account

SEED = int(os.environ.get("DSAGENT_LAB_SEED", "1"))
HIT_RATIO = 0.10  # of e2e, from which on a request counts as hit
RIGHT_RATIO = 0.90  # the floor of this first set; the target of the full laboratory is 0.95
RAN_RATIO = 0.15  # of its time a hog has to have the CPU; beside a busy engine it has about half
MOST_STARVED = 4
UNATTRIBUTED_RATIO = 0.05  # of e2e, at the median, where nothing is wrong


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done, by the injector's own clock."""

    name: str
    start_ns: int
    end_ns: int
    culprit: str | None = None  # a command, or a trace id

    def hit_ns(self, account: Account) -> int:
        """How much of the request's life it covers."""
        record = account.record
        return max(0, min(self.end_ns, record.sent_ns) - max(self.start_ns, record.received_ns))


def long_prefill(target: Engine, words: int, dice: random.Random) -> Fault:
    """A long prompt sent into whatever is running; its prefill lasts until its first token."""
    sent = send(target, text(dice, words), 2, dice)
    assert sent.error is None, sent.error
    until_ns = sent.first_ns or sent.end_ns
    assert until_ns is not None
    return Fault("long prefill", sent.sent_ns, until_ns, sent.trace_id)


def hog(cpus: set[int], seconds: float = 2.5) -> list[Fault]:
    """Hogs that got to run, and before them those that the kernel kept from their CPU: these hit
    nobody, but that nothing was wrong meanwhile is not known either."""
    starved: list[Fault] = []
    while len(starved) < MOST_STARVED:
        before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        start_ns, end_ns = run_hogs(cpus, seconds, 0)
        ran_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s
        if ran_s >= RAN_RATIO * seconds * len(cpus):
            return [*starved, Fault("hog", start_ns, end_ns, HOG)]
        starved.append(Fault("starved hog", start_ns, end_ns))
    raise RuntimeError(f"{MOST_STARVED} times the kernel kept the hogs from their CPUs")


@dataclass(slots=True)
class Run:
    faults: list[Fault]
    observed: Observed
    load_errors: list[str]
    waited: Timeline  # on the run queue, as schedstat counts it: what strangers did meanwhile

    def disturbed(self, fault: Fault, account: Account) -> bool:
        """By others more than by the fault: then the fault is not the right answer."""
        record = account.record
        waited_ns = self.waited.within(record.received_ns, record.sent_ns)
        return fault.name != "hog" and waited_ns > 0.5 * fault.hit_ns(account)

    def hit(self, name: str) -> list[tuple[Fault, Account]]:
        return [
            (fault, account)
            for fault in self.faults
            if fault.name == name
            for account in self.observed.accounts.values()
            if account.trace_id != fault.culprit
            and account.record.error is None
            and not account.partial
            and fault.hit_ns(account) >= HIT_RATIO * account.e2e_ns
            and not self.disturbed(fault, account)
        ]

    def unhit(self) -> list[Account]:
        return [
            account
            for account in self.observed.accounts.values()
            if not account.partial
            and account.record.error is None
            and all(fault.hit_ns(account) == 0 for fault in self.faults)
        ]


def warm(target: Engine, load: Load, dice: random.Random) -> None:
    """Enough clean steps of every kind for the model to know them."""
    load.wait_for(16)
    for words in (60, 200, 400):
        send(target, text(dice, words), 2, dice)
    load.wait_for(8)


def observe(
    target: Engine, computing_pid: int, directory: Path, stop: Callable[[float], tuple[int, int]]
) -> Run:
    """`stop` stops the engine for so many seconds; start and end. `computing_pid` is its process
    that computes."""
    dice = random.Random(SEED)
    faults: list[Fault] = []
    with KernelAccounts(computing_pid) as kernel, agent(target.pid, directory) as observed:
        with Load(target, clients=3, max_tokens=(12, 24), seed=SEED) as load:
            warm(target, load, dice)
            for _ in range(3):
                faults.append(Fault("stop", *stop(0.3)))
                load.wait_for(5)
            for _ in range(2):
                faults += hog(os.sched_getaffinity(target.pid))
                load.wait_for(5)
            for _ in range(3):
                faults.append(long_prefill(target, 400, dice))
                load.wait_for(5)
        sent = list(load.sent)
    return Run(faults, observed, [s.error for s in sent if s.error], kernel.waited_least)


def explained(pairs: list[tuple[Fault, Account]], cause: str) -> str:
    rows = [
        f"{fault.name} hit {fault.hit_ns(a) / 1e6:.0f} of {a.e2e_ns / 1e6:.0f} ms; "
        f"top {a.top.cause if a.top else None}; "
        + ", ".join(f"{p.cause} {p.ns / 1e6:.0f}" for p in a.parts)
        + f", unattributed {a.unattributed_ns / 1e6:.0f}"
        for fault, a in pairs
        if a.top is None or a.top.cause != cause
    ]
    return "\n".join(rows)


def upper_bound(right: int, of: int) -> float:
    """Of the true ratio, at 95 % (Wilson 1927): a small sample fails only where it is sure."""
    z = 1.96
    ratio = right / of
    middle = ratio + z * z / (2 * of)
    spread = z * math.sqrt(ratio * (1 - ratio) / of + z * z / (4 * of * of))
    return (middle + spread) / (1 + z * z / of)


def assert_right(pairs: list[tuple[Fault, Account]], cause: str) -> list[tuple[Fault, Account]]:
    assert pairs, "the injection hit nobody whom others had not hit harder"
    right = [(f, a) for f, a in pairs if a.top is not None and a.top.cause == cause]
    print(f"{cause}: {len(right)} of {len(pairs)} hit requests")
    assert upper_bound(len(right), len(pairs)) >= RIGHT_RATIO, explained(pairs, cause)
    return right


def check_nothing_was_lost(run: Run) -> None:
    assert not run.load_errors
    assert run.observed.summary["uncounted_losses"] == 0
    states = {s["name"]: s["state"] for s in run.observed.summary["sources"]}
    assert states["steps"] == "ok"
    assert states["kernel"] == "ok", run.observed.summary


def check_stops(run: Run) -> None:
    right = assert_right(run.hit("stop"), "process.stopped")
    for fault, account in right:
        said_ns = sum(p.ns for p in account.parts if p.cause == "process.stopped")
        # Two clocks on one event: the injector's signals and the kernel's state changes.
        assert abs(said_ns - fault.hit_ns(account)) <= max(0.15 * fault.hit_ns(account), 5e6)


def check_hogs(run: Run) -> None:
    right = assert_right(run.hit("hog"), "cpu.runqueue")
    first = Counter(a.top.culprits[0].name for _, a in right if a.top and a.top.culprits)
    print(f"culprit named: {first[HOG]} of {len(right)}")
    assert upper_bound(first[HOG], len(right)) >= RIGHT_RATIO, dict(first)


def check_long_prefills(run: Run) -> None:
    # Those that were decoding when it came; who came after it had to wait for its step.
    decoding = [
        (fault, account)
        for fault, account in run.hit("long prefill")
        if account.record.first_token_ns is not None
        and account.record.first_token_ns < fault.start_ns
    ]
    right = assert_right(decoding, "batch.prefill_interference")
    named = 0
    for fault, account in right:
        assert account.top is not None
        named += account.top.culprits[0].trace_id == fault.culprit
        blamed = [d for d in account.delayed_by if d.cause == "batch.prefill_interference"]
        assert sum(d.ns for d in blamed) == account.top.ns
    print(f"culprit named: {named} of {len(right)}")
    assert upper_bound(named, len(right)) >= RIGHT_RATIO


def check_unhit(run: Run) -> None:
    quiet = run.unhit()
    assert len(quiet) >= 10
    alarms = [a for a in quiet if a.top is not None and a.top.cause == "process.stopped"]
    assert not alarms
    ratios = sorted(a.unattributed_ns / a.e2e_ns for a in quiet)
    median = ratios[len(ratios) // 2]
    print(f"unattributed, median of {len(quiet)} unhit requests: {median:.3f}")
    assert median <= UNATTRIBUTED_RATIO
