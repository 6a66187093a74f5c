"""What the agent did not look at during a request's life is said by its account."""

from __future__ import annotations

from dataclasses import replace

from dsagent.agent.attribution.accountant import Accountant, _so_far
from dsagent.instrumentation.records import RequestOpen, RequestRecord

S = 1_000_000_000


def _record(received_ns: int, sent_ns: int) -> RequestRecord:
    opened = RequestOpen(
        request_key=1,
        request_id="r1",
        trace_id=1,
        span_id=1,
        parent_span_id=None,
        sampled=None,
        pid=1,
        tid=1,
        received_ns=received_ns,
    )
    return replace(_so_far(opened, sent_ns), sent_ns=sent_ns)


def test_each_life_gets_the_names_of_its_own_time() -> None:
    accountant = Accountant(0)
    accountant.looks_at_all_but(10 * S, ("b", "a"))
    accountant.looks_at_all_but(20 * S, ("kernel",))
    accountant.looks_at_all_but(30 * S, ())
    found = {
        (begin, end): accountant._not_looked_at(_record(begin * S, end * S))
        for begin, end in (
            (1, 9),
            (5, 12),
            (12, 15),
            (15, 25),
            (22, 28),
            (25, 40),
            (31, 40),
            (1, 50),
        )
    }
    assert found == {
        (1, 9): (),
        (5, 12): ("a", "b"),
        (12, 15): ("a", "b"),
        (15, 25): ("a", "b", "kernel"),
        (22, 28): ("kernel",),
        (25, 40): ("kernel",),
        (31, 40): (),
        (1, 50): ("a", "b", "kernel"),
    }
