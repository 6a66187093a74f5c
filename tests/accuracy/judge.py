"""Lays the agent's accounts beside the truth: one Case for each request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import quantiles

from baseline import Facts, top_cause
from score import AFFECTED_RATIO, Case
from truth import Evidence, Fault, Injection, Pace

from dsagent.agent.attribution.account import USUAL, Account

# Of these a lone request can always have some: the load of this run itself makes them.
OF_THE_LOAD = frozenset(
    {
        "queue.wait",
        "queue.kv_blocks",
        "batch.not_scheduled",
        "batch.prefill_interference",
        "preempted",
        "engine.gap",
        "unobserved",
    }
)
NEIGHBOUR_NS = 100_000_000  # so near to a deed a request is in neither group
SUPPORTED = 0.5  # a delay of which the kernel's own account confirms half is no false alarm


def cases(evidence: Evidence, facts: Facts) -> Iterator[Case]:
    """All complete requests, those of the injectors themselves excepted."""
    pace = Pace(evidence.sent, evidence.injections)
    usual = _usual(evidence)
    spreads = {name: _spread_ns(evidence, pace, name) for name in evidence.faults}
    senders = {trace for injection in evidence.injections for trace in injection.senders}
    for account in evidence.accounts.values():
        trace_id = account.trace_id
        if account.partial or account.record.error or trace_id in senders or not account.e2e_ns:
            continue
        near = [i for i in evidence.injections if _near(i, account)]
        done = [(_done_ns(evidence, pace, i, account), i) for i in near]
        done_ns, injection = max(done, key=lambda pair: pair[0], default=(0.0, None))
        if injection is None:
            injection = _last_before(evidence, account)
            if injection is None:
                continue
        elif done_ns < AFFECTED_RATIO * account.e2e_ns:
            continue  # there, but hardly touched: neither affected nor surely unaffected
        fault = evidence.faults[injection.fault]
        if (
            not _is_of_cpu(fault)
            and not fault.queued
            and 0 < done_ns < _strangers_ns(evidence, account)
        ):
            continue  # by the kernel's own account strangers took more than the deed did
        yield _case(evidence, fault, injection, account, done_ns, spreads[fault.name], usual, facts)


def _near(injection: Injection, account: Account) -> bool:
    record = account.record
    return (
        injection.start_ns - NEIGHBOUR_NS < record.sent_ns
        and injection.end_ns + NEIGHBOUR_NS > record.received_ns
        and (injection.end_ns > injection.start_ns)
    )


def _last_before(evidence: Evidence, account: Account) -> Injection | None:
    before = [i for i in evidence.injections if i.start_ns <= account.record.received_ns]
    return max(before, key=lambda i: i.start_ns, default=None)


def _is_of_cpu(fault: Fault) -> bool:
    """The kernel's account of waiting for a CPU holds the deed itself (a throttled thread waits
    on the run queue too)."""
    return not fault.causes.isdisjoint({"cpu.runqueue", "cpu.throttled"})


def _strangers_ns(evidence: Evidence, account: Account) -> float:
    """What was lost on the run queue in its life: between the least and the most, the middle."""
    return sum(_queued_ns(evidence, account)) / 2


def _done_ns(evidence: Evidence, pace: Pace, injection: Injection, account: Account) -> float:
    """How much of it the deed made, by the truth."""
    if injection.victims is not None and account.trace_id not in injection.victims:
        return 0.0
    fault = evidence.faults[injection.fault]
    start_ns, end_ns = fault.span(account, injection)
    start_ns, end_ns = max(start_ns, injection.start_ns), min(end_ns, injection.end_ns)
    if end_ns <= start_ns:
        return 0.0
    if injection.timeline is not None:
        return injection.timeline.within(start_ns, end_ns)
    sent = next((s for s in evidence.sent if s.trace_id == account.trace_id), None)
    if sent is None:
        return 0.0
    excess_ns = pace.excess_ns(sent, start_ns, end_ns, fault.least_gap)
    if excess_ns is None:
        return 0.0
    if not _is_of_cpu(fault):
        # Who waits for a request also waits while strangers hold that one up.
        least_ns = evidence.waited_least.within(start_ns, end_ns)
        most_ns = evidence.waited_most.within(start_ns, end_ns)
        excess_ns -= (least_ns + most_ns) / 2
    return max(0.0, excess_ns)


def _spread_ns(evidence: Evidence, pace: Pace, name: str) -> float:
    """What the same measure says of requests to which nothing was done: 95 % lie below. Of a
    clock, and of a counter of the very thing, that is nothing."""
    if evidence.faults[name].how != "counterfactual":
        return 0.0
    found = []
    for account in evidence.accounts.values():
        if account.partial or any(_near(i, account) for i in evidence.injections):
            continue
        sent = next((s for s in evidence.sent if s.trace_id == account.trace_id), None)
        record = account.record
        excess = None if sent is None else pace.excess_ns(sent, record.received_ns, record.sent_ns)
        if excess is not None:
            found.append(abs(excess))
    return quantiles(found, n=20)[-1] if len(found) > 1 else 0.0


def _usual(evidence: Evidence) -> dict[str, float]:
    """The share of e2e that each of the usual causes has where nothing was done."""
    totals: dict[str, int] = {}
    e2e_ns = 0
    for account in evidence.accounts.values():
        if not account.partial and not any(_near(i, account) for i in evidence.injections):
            e2e_ns += account.e2e_ns
            for part in account.parts:
                if part.cause in USUAL:
                    totals[part.cause] = totals.get(part.cause, 0) + part.ns
    return {cause: ns / e2e_ns for cause, ns in totals.items()} if e2e_ns else {}


def _case(
    evidence: Evidence,
    fault: Fault,
    injection: Injection,
    account: Account,
    done_ns: float,
    spread_ns: float,
    usual: Mapping[str, float],
    facts: Facts,
) -> Case:
    top = account.top
    said_ns: float = sum(p.ns for p in account.parts if p.cause in fault.causes)
    own_ns = account.e2e_ns - done_ns
    said_ns -= sum(usual.get(cause, 0.0) * own_ns for cause in fault.causes)
    right = top is not None and top.cause in _larger(evidence, fault, account, done_ns)
    if fault.queued:
        right = right and _all_listed(evidence, fault, account)
    named: bool | None = None
    if injection.culprits:
        named = right and top is not None and _names_one(account, injection)
    baseline = top_cause(facts, account)
    by_how = {"measured": 0, "modelled": 0, "assumed": 0}
    for part in account.parts:
        by_how[part.how] += part.ns
    return Case(
        fault=fault.name,
        e2e_ns=account.e2e_ns,
        done_ns=done_ns,
        said_ns=said_ns,
        right=right,
        named=named,
        false_alarm=done_ns == 0 and _is_false_alarm(evidence, account),
        baseline_right=done_ns > 0 and baseline in fault.causes,
        unattributed_ns=account.unattributed_ns,
        measured_ns=by_how["measured"],
        modelled_ns=by_how["modelled"],
        assumed_ns=by_how["assumed"],
        spread_ns=spread_ns,
        sized=fault.sized,
        detail=_detail(account, baseline, evidence),
    )


def _queued_ns(evidence: Evidence, account: Account) -> tuple[float, float]:
    """What was lost on the run queue in its life: at least, at most."""
    start_ns, end_ns = account.record.received_ns, account.record.sent_ns
    least_ns = evidence.waited_least.within(start_ns, end_ns)
    return least_ns, evidence.waited_most.within(start_ns, end_ns)


def _larger(evidence: Evidence, fault: Fault, account: Account, done_ns: float) -> frozenset[str]:
    """What the top cause should be: of two deeds the larger, either where that is not known."""
    if not fault.queued:
        return fault.causes
    least_ns, most_ns = _queued_ns(evidence, account)
    if least_ns > done_ns:
        return fault.queued
    return fault.causes if most_ns < done_ns else fault.causes | fault.queued


def _all_listed(evidence: Evidence, fault: Fault, account: Account) -> bool:
    """The second deed is in the account too, where it was worth telling."""
    least_ns, _ = _queued_ns(evidence, account)
    listed = any(part.cause in fault.queued for part in account.parts)
    return listed or least_ns < AFFECTED_RATIO * account.e2e_ns


def _detail(account: Account, baseline: str | None, evidence: Evidence) -> str:
    least_ns, most_ns = _queued_ns(evidence, account)
    parts = sorted(account.parts, key=lambda part: -part.ns)
    told = ", ".join(
        f"{p.cause} {p.ns / 1e6:.0f}" + "".join(f" [{c.name[:16]}]" for c in p.culprits[:2])
        for p in parts
        if p.ns >= 0.01 * account.e2e_ns
    )
    return (
        f"{account.trace_id[:8]} e2e {account.e2e_ns / 1e6:.0f} ms: {told}, "
        f"unattributed {account.unattributed_ns / 1e6:.0f}; "
        f"schedstat {least_ns / 1e6:.0f} to {most_ns / 1e6:.0f}; baseline {baseline}"
    )


def _names_one(account: Account, injection: Injection) -> bool:
    """The first culprit of the top cause is one of those who did it; where several requests did
    it together, most of the blame is theirs."""
    top = account.top
    if top is None or not top.culprits:
        return False
    done_by = [c for c in top.culprits if {c.name, c.trace_id} & injection.culprits]
    if len(injection.culprits) > 1:
        return 2 * sum(c.ns for c in done_by) > sum(c.ns for c in top.culprits)
    return max(top.culprits, key=lambda culprit: culprit.ns) in done_by


def _is_false_alarm(evidence: Evidence, account: Account) -> bool:
    top = account.top
    if top is None or top.cause in USUAL or top.cause in OF_THE_LOAD:
        return False
    by_kernel = {"cpu.runqueue": evidence.waited_most, "cpu.steal": evidence.stolen}
    if top.cause in by_kernel:
        record = account.record
        counted_ns = by_kernel[top.cause].within(record.received_ns, record.sent_ns)
        return counted_ns < SUPPORTED * top.ns
    return True
