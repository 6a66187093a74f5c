"""Which traces are kept: the precedence, the rate, what stands out."""

from __future__ import annotations

import random
from typing import Any

import pytest
from made import MS, account

from dsagent.agent.attribution.account import Account
from dsagent.agent.session.sampling import MAX_RATE, MIN_RATE, Decision, Sampler, is_within_rate

RNG_SEED = 7


def no_context(name: str, low_bits: int = 0, **changes: Any) -> Account:
    """`low_bits`: the random part of the trace id; 0 is never within a rate below 1."""
    return account(name, trace_id=(1 << 127) | low_bits, sampled=None, **changes)


def test_the_callers_flag_comes_first() -> None:
    sampler = Sampler(rate=0.0)
    assert sampler.decide(account("a", sampled=True), []) == Decision(True, "parent")
    assert sampler.decide(account("b", sampled=False, error="bad"), ["ttft"]) == Decision(
        False, "parent", slow=True
    )


def test_the_override_keeps_violators_and_marks_them() -> None:
    sampler = Sampler(rate=1.0, override_sampled_0=True)
    assert sampler.decide(account("a", sampled=False), ["tpot", "e2e"]) == Decision(
        True, "override:tpot", slow=True
    )
    assert not sampler.decide(account("b", sampled=False), []).keep


def test_violators_and_errors_without_context_are_kept() -> None:
    sampler = Sampler(rate=0.0)
    assert sampler.decide(no_context("a"), ["ttft"]) == Decision(True, "slo:ttft", slow=True)
    assert sampler.decide(no_context("b", error="abort"), []) == Decision(True, "error")
    assert sampler.decide(no_context("c"), []) == Decision(False, "rate")


def test_a_request_is_decided_once() -> None:
    sampler = Sampler(rate=0.0)
    first = sampler.decide(no_context("a", error="abort"), [])
    assert sampler.decide(no_context("a", error="abort"), ["ttft"]) is first


def test_the_rate_rises_with_the_errors_within_its_bounds() -> None:
    sampler = Sampler()
    assert sampler.rate == MIN_RATE
    for i in range(1000):
        sampler.decide(account(f"r{i}", error="bad" if i % 50 == 0 else None), [])
    assert 0.01 < sampler.rate < 0.03
    for i in range(1000):
        sampler.decide(account(f"bad{i}", error="bad"), [])
    assert sampler.rate == MAX_RATE
    for i in range(2000):
        sampler.decide(account(f"good{i}"), [])
    assert sampler.rate == MIN_RATE
    assert Sampler(rate=0.25).rate == 0.25
    with pytest.raises(ValueError, match="within 0 and 1"):
        Sampler(rate=1.5)


def test_a_rate_is_decided_by_the_trace_id_alone() -> None:
    rng = random.Random(RNG_SEED)
    trace_ids = [rng.getrandbits(128) for _ in range(20_000)]
    kept = {t for t in trace_ids if is_within_rate(t, 0.05)}
    assert 0.04 < len(kept) / len(trace_ids) < 0.06
    # What a lower rate keeps, a higher one keeps, too.
    assert {t for t in trace_ids if is_within_rate(t, 0.01)} < kept
    assert all(is_within_rate(t, 1.0) for t in trace_ids)
    assert not any(is_within_rate(t, 0.0) for t in trace_ids)


def test_outliers_are_kept_once_it_is_known_what_is_usual() -> None:
    sampler = Sampler(rate=0.0)
    rng = random.Random(RNG_SEED)
    start_ns = 2000 * 1000 * MS

    def with_ttft(name: str, ttft_ms: float) -> Account:
        first_sent_ns = start_ns + round(ttft_ms * MS)
        key = int.from_bytes(name.encode(), "big") << 56
        return account(
            name,
            trace_id=key,
            first_sent_ns=first_sent_ns,
            sent_ns=first_sent_ns + 700 * MS,
        )

    assert not sampler.decide(with_ttft("early", 5000), []).keep
    usual = [with_ttft(f"u{i}", 200 * rng.lognormvariate(0, 0.2)) for i in range(300)]
    reasons = [sampler.decide(made, []).reason for made in usual]
    assert reasons.count("outlier") < 10
    assert sampler.decide(with_ttft("late", 2000), []) == Decision(True, "outlier", slow=True)


def test_steady_latencies_make_no_outliers_of_little_changes() -> None:
    sampler = Sampler(rate=0.0)
    for i in range(300):
        sampler.decide(account(f"r{i}"), [])
    changed = no_context("a", first_sent_ns=2000 * 1000 * MS + 305 * MS)
    assert sampler.decide(changed, []).reason == "rate"
