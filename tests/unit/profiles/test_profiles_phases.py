"""Samples get the phase of the step that ran, and repeats their place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import MS, S, step

from dsagent.agent.profiles.phases import (
    MOST_PROCESSES,
    MOST_RANKS,
    NOT_PLACED,
    Span,
    Steps,
    Weighed,
    weigh,
)
from dsagent.agent.profiles.stacks import Frame, Recorded, Seen
from dsagent.instrumentation.records import RankStep

BEGAN_NS = 2000 * S
ENGINE_PID, LOOP_TID = 4242, 4243
FORWARD, SAMPLE = Frame("forward", "/f.py", 1), Frame("sample", "/s.py", 2)


def seen(at_ms: float, frame: Frame = FORWARD, tid: int | None = LOOP_TID) -> Seen:
    return Seen(BEGAN_NS + round(at_ms * MS), tid, "engine-loop", (frame,))


def span(start_ms: int, end_ms: int, phase: Any = "decode", tid: int = LOOP_TID) -> Span:
    return Span(BEGAN_NS + start_ms * MS, BEGAN_NS + end_ms * MS, tid, phase)


def run(*samples: Seen, repeats: int = 0) -> Recorded:
    return Recorded(ENGINE_PID, BEGAN_NS, BEGAN_NS + 10 * S, 50 * MS, samples, repeats)


def weighed(recorded: Recorded, *spans: Span, known_ms: int = 10_000) -> list[Weighed]:
    return weigh(recorded, spans, BEGAN_NS + known_ms * MS, "engine")


def phases(*samples: Seen, spans: tuple[Span, ...], known_ms: int = 10_000) -> list[str | None]:
    return [each.phase for each in weighed(run(*samples), *spans, known_ms=known_ms)]


def test_a_sample_has_the_phase_of_the_step_that_ran() -> None:
    spans = (span(0, 10, "prefill"), span(20, 30, "mixed"), span(30, 40, "decode"))
    found = phases(*map(seen, (5, 15, 29.9, 30, 39.9, 50)), spans=spans)
    assert found == ["prefill", "idle", "mixed", "decode", "decode", "idle"]


def test_after_the_last_step_known_nothing_tells() -> None:
    assert phases(seen(35), seen(45), spans=(span(0, 40),), known_ms=40) == ["decode", None]
    assert phases(seen(5), spans=(), known_ms=-1) == [None]


def test_where_steps_overlap_it_is_the_later_one() -> None:
    spans = (span(0, 30, "prefill"), span(20, 40, "decode"))
    assert phases(*map(seen, (10, 25, 35)), spans=spans) == ["prefill", "decode", "decode"]


def test_repeats_go_to_silent_time_in_steps() -> None:
    # Of 400 ms with steps, 300 belong to what was seen at 0, and 100 to what was seen at 300.
    recorded = run(seen(0, FORWARD), seen(300, SAMPLE), repeats=4)
    out = weighed(recorded, span(0, 200, "prefill"), span(200, 400, "decode"))
    sums: dict[tuple[str, str | None], float] = {}
    for each in out:
        key = (each.frames[0].function, each.phase)
        sums[key] = sums.get(key, 0.0) + each.samples
    assert sums == pytest.approx(
        {("forward", "prefill"): 1 + 2.0, ("forward", "decode"): 1.0, ("sample", "decode"): 1 + 1.0}
    )


def test_repeats_beyond_the_time_there_was_are_kept_apart() -> None:
    out = weighed(run(seen(0), repeats=10), span(0, 100))
    placed = [each for each in out if each.frames != (NOT_PLACED,)]
    (rest,) = (each for each in out if each.frames == (NOT_PLACED,))
    assert sum(each.samples for each in placed) == pytest.approx(1 + 2)  # 100 ms, one each 50 ms
    assert rest.samples == pytest.approx(8)
    assert rest.phase is None


def test_threads_that_are_no_loop_get_no_repeats() -> None:
    out = weighed(run(seen(0, tid=99), seen(1, tid=None), repeats=3), span(0, 1000))
    assert [each.samples for each in out] == [1, 1, 3]
    assert out[-1].frames == (NOT_PLACED,)


@given(
    st.lists(st.tuples(st.integers(0, 9_999), st.sampled_from([LOOP_TID, 1, None])), max_size=30),
    st.lists(st.tuples(st.integers(0, 9_999), st.integers(1, 500)), max_size=30),
    st.integers(0, 500),
)
def test_all_samples_add_up(
    times: list[tuple[int, int | None]], steps: list[tuple[int, int]], repeats: int
) -> None:
    samples = [seen(at, tid=tid) for at, tid in sorted(times, key=lambda each: each[0])]
    spans = [span(start, start + ms) for start, ms in sorted(steps)]
    out = weighed(run(*samples, repeats=repeats), *spans)
    total = sum(each.samples for each in out)
    assert total == pytest.approx(len(samples) + repeats, abs=0.5)
    assert all(each.samples > 0 for each in out)


def rank_step(step_id: int, pid: int, start_ns: int) -> RankStep:
    return RankStep(5, step_id, 0, pid, pid + 1, start_ns, start_ns + 10 * MS)


def test_steps_are_known_by_process() -> None:
    steps = Steps()
    at = BEGAN_NS
    steps.add((), (rank_step(1, 77, at + MS),))
    assert steps.of(77, at, at + S) == []  # what kind of step it is, its scheduler will tell
    steps.add((step(1, start_ns=at, prefill_tokens=5, decode_tokens=0),), ())
    (of_rank,) = steps.of(77, at, at + S)
    assert (of_rank.phase, of_rank.tid) == ("prefill", 78)
    assert [each.phase for each in steps.of(ENGINE_PID, at, at + S)] == ["prefill"]
    assert [each.phase for each in steps.of(1, at, at + S)] == ["prefill"]  # serves that engine
    assert [steps.role(pid) for pid in (ENGINE_PID, 77, 1)] == ["engine", "worker", "frontend"]
    assert steps.of(ENGINE_PID, at + S, at + 2 * S) == []


def test_a_front_end_of_two_engines_has_no_phase() -> None:
    steps = Steps()
    steps.add((step(1, start_ns=BEGAN_NS), step(1, start_ns=BEGAN_NS, pid=9, engine_id=6)), ())
    assert steps.of(1, BEGAN_NS, BEGAN_NS + S) == []
    assert steps.latest_end_ns(1) == 0
    assert steps.latest_end_ns(9) == BEGAN_NS + 20 * MS


def test_steps_of_a_thread_that_overlap_are_gone_through_once() -> None:
    many = [span(0, 10_000) for _ in range(2000)]
    out = weighed(run(seen(0), seen(500), repeats=100), *many)
    assert len(out) == 4  # two that were seen, and their repeats
    assert sum(each.samples for each in out) == pytest.approx(102)


def test_whatever_a_process_claims_of_its_steps_memory_is_bounded() -> None:
    steps = Steps()
    for at in range(3):
        steps.add((), [rank_step(1, 77, BEGAN_NS + at)] * (2 * MOST_RANKS))
    for pid in range(1, 3 * MOST_PROCESSES):
        steps.add((step(pid, start_ns=BEGAN_NS, pid=pid, engine_id=6),), ())
    steps.add((step(1, start_ns=BEGAN_NS),), ())
    known = range(1, 5 * MOST_PROCESSES)
    assert sum(steps.role(pid) != "frontend" for pid in known) <= MOST_PROCESSES
    assert len(steps.of(77, BEGAN_NS, BEGAN_NS + S)) == MOST_RANKS
