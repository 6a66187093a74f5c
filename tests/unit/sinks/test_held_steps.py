"""Steps wait for their requests, are linked to the kept ones, and do not pile up."""

from __future__ import annotations

from made import S, record, step

from dsagent.agent.sinks.held_steps import HOLD_NS, HeldSteps
from dsagent.instrumentation.spans import Span

ENDED_NS = record().sent_ns


def linked(spans: list[Span]) -> list[tuple[object, list[int]]]:
    """The step ids and the span ids that they link to."""
    return [(s.attributes["dsagent.step.id"], [link.span_id for link in s.links]) for s in spans]


def test_a_step_waits_for_its_last_request_and_five_seconds() -> None:
    held = HeldSteps()
    held.add(step(1, ("a", "b")))
    held.end_request(record("a"), kept=True)
    assert held.due(ENDED_NS + 100 * S) == []
    later = record("b", start_ns=3000 * S)
    held.end_request(later, kept=True)
    assert held.due(later.sent_ns + HOLD_NS - 1) == []
    assert linked(held.due(later.sent_ns + HOLD_NS)) == [
        (1, [record("a").span_id, record("b").span_id])
    ]
    assert len(held) == 0


def test_only_steps_that_serve_a_kept_request_and_links_only_to_those() -> None:
    held = HeldSteps()
    held.add(step(1, ("a", "b")))
    held.add(step(2, ("b",)))
    held.end_request(record("b"), kept=False)
    held.end_request(record("a"), kept=True)
    assert linked(held.due(ENDED_NS + HOLD_NS)) == [(1, [record("a").span_id])]
    assert len(held) == 0


def test_more_links_than_an_sdk_would_take() -> None:
    held = HeldSteps()
    batch = tuple(f"r{i}" for i in range(200))
    held.add(step(1, batch))
    for name in batch:
        held.end_request(record(name), kept=True)
    (span,) = held.due(ENDED_NS + HOLD_NS)
    assert len(span.links) == 200


def test_a_step_that_comes_after_the_end_of_its_request() -> None:
    held = HeldSteps()
    held.end_request(record("a"), kept=True)
    held.add(step(1, ("a",)))
    assert linked(held.due(ENDED_NS + HOLD_NS)) == [(1, [record("a").span_id])]


def test_two_engines_may_count_alike_and_a_record_may_come_twice() -> None:
    held = HeldSteps()
    held.add(step(1, ("a",)))
    held.add(step(1, ("a",)))
    held.add(step(1, ("b",), engine_id=6))
    assert len(held) == 2
    assert [s.engine_id for s in held.steps_of(6, (1, 2))] == [6]


def test_the_oldest_are_given_up_and_counted() -> None:
    held = HeldSteps(max_steps=10)
    for i in range(25):
        held.add(step(i, ("never ends", f"r{i}")))
    assert (len(held), held.given_up) == (10, 15)
    held.end_request(record("never ends"), kept=True)
    for i in range(25):
        held.end_request(record(f"r{i}"), kept=False)
    assert [step_id for step_id, _ in linked(held.due(ENDED_NS + HOLD_NS))] == [*range(15, 25)]


def test_the_bytes_are_bounded_too() -> None:
    held = HeldSteps(max_bytes=1 << 20)
    for i in range(100):
        held.add(step(i, tuple(f"r{j}" for j in range(1000))))
    assert len(held) + held.given_up == 100
    assert len(held) < 10


def test_at_the_end_what_is_known_is_let_go() -> None:
    held = HeldSteps()
    held.add(step(1, ("a", "still runs")))
    held.add(step(2, ("still runs",)))
    held.end_request(record("a"), kept=True)
    assert linked(held.flush()) == [(1, [record("a").span_id])]
    assert len(held) == 0
