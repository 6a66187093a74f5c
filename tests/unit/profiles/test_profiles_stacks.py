"""What py-spy writes, and what it would never write, is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsagent.agent.profiles.stacks import MAX_DEPTH, NotATrace, Seen, TraceReader, samples_told

BEGAN_NS, ENDED_NS = 1_000_000_000_000, 1_010_000_000_000
ENGINE = ("thread (5244): engine-loop", "", 0)
MAIN, STEP, FORWARD = ("main", "/m.py", 1), ("step", "/l.py", 190), ("forward", "/f.py", 94)


def event(what: str, frame: tuple[str, str, int], at_us: int, tid: int = 7, **changes: Any) -> Any:
    name, file, line = frame
    made = {
        "args": {"filename": file, "line": line},
        "cat": "py-spy",
        "name": name,
        "ph": what,
        "pid": 4086,
        "tid": tid,
        "ts": at_us,
    }
    return made | changes


def read_trace(text: bytes, began_ns: int, ended_ns: int) -> tuple[list[Seen], int]:
    reader = TraceReader(text, began_ns, ended_ns)
    while not reader.is_over:
        reader.read_event()
    return reader.result()


def read(*events: Any) -> tuple[list[Seen], int]:
    return read_trace(json.dumps(events).encode(), BEGAN_NS, ENDED_NS)


def functions(seen: Seen) -> list[str]:
    return [frame.function for frame in seen.frames]


def test_a_sample_is_what_is_on_the_stack_after_a_moment() -> None:
    seen, damaged = read(
        *(event("B", frame, 100) for frame in (ENGINE, MAIN, STEP)),
        event("E", STEP, 300),
        event("B", FORWARD, 300),
        event("E", FORWARD, 900),
    )
    assert damaged == 0
    assert [functions(each) for each in seen] == [["main", "step"], ["main", "forward"], ["main"]]
    assert [each.at_ns - BEGAN_NS for each in seen] == [100_000, 300_000, 900_000]
    assert {(each.tid, each.thread) for each in seen} == {(5244, "engine-loop")}


def test_the_end_of_the_trace_is_no_sample() -> None:
    seen, damaged = read(
        *(event("B", frame, 100) for frame in (ENGINE, MAIN)),
        *(event("E", frame, 500) for frame in (MAIN, ENGINE)),
    )
    assert (len(seen), damaged) == (1, 0)


def test_threads_are_told_apart_and_samples_come_in_the_order_of_time() -> None:
    seen, _ = read(
        event("B", ("thread (0x10): a b: c", "", 0), 400, tid=1),
        event("B", MAIN, 400, tid=1),
        event("B", ENGINE, 200, tid=2),
        event("B", STEP, 200, tid=2),
    )
    assert [(each.tid, each.thread) for each in seen] == [(5244, "engine-loop"), (16, "a b: c")]


def test_a_thread_without_a_name_or_number_has_none() -> None:
    seen, _ = read(
        event("B", ("thread (12)", "", 0), 100), event("B", MAIN, 100), event("B", MAIN, 100, tid=9)
    )
    assert [(each.tid, each.thread) for each in seen] == [(12, ""), (None, "")]


def test_a_function_may_be_named_like_a_thread() -> None:
    (seen,), _ = read(event("B", ("thread (1): x", "/evil.py", 3), 100))
    assert seen.tid is None
    assert functions(seen) == ["thread (1): x"]


def test_text_is_bounded_and_safe_on_a_terminal() -> None:
    (seen,), _ = read(event("B", ("\x1b[2J\ud800" + "x" * 999, "\n/f", 1), 100))
    frame = seen.frames[0]
    assert frame.function.isprintable() and len(frame.function) < 300
    assert frame.file == "\\n/f"


def test_only_the_innermost_frames_of_a_deep_stack_are_kept() -> None:
    (seen,), _ = read(*(event("B", (f"f{depth}", "/d.py", 1), 100) for depth in range(900)))
    assert len(seen.frames) == MAX_DEPTH
    assert seen.frames[-1].function == "f899"


@pytest.mark.parametrize(
    "bad",
    [
        event("B", MAIN, -1),
        event("B", MAIN, 1 << 60),
        event("X", MAIN, 100),
        event("B", MAIN, 100, tid="7"),
        event("B", MAIN, 100, args={}),
        event("B", ("main", "/m.py", -4), 100),
        event("E", MAIN, 100),
        event("B", MAIN, 99_000_000),  # after the end of the run
        None,
        [],
    ],
)
def test_what_makes_no_sense_is_counted(bad: Any) -> None:
    seen, damaged = read(bad, event("B", ENGINE, 200, tid=1), event("B", MAIN, 200, tid=1))
    assert damaged == 1
    assert len(seen) == 1


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{}", b"[", b"\xff", b"1", b"[" * 100_000, b'{"traceEvents": []}'),
        *(b"[1", b"[1,", b"[1,]", b"[1 2]", b"[,1]", b"[1] 2", b"[] 2", b"[1}", b"[NaN"),
    ],
)
def test_what_is_no_trace_is_refused(text: bytes) -> None:
    with pytest.raises(NotATrace):
        read_trace(text, BEGAN_NS, ENDED_NS)


def test_an_empty_trace_is_one() -> None:
    assert read() == ([], 0)
    assert read_trace(b" [ ]\n", BEGAN_NS, ENDED_NS) == ([], 0)


def test_space_between_events_is_none() -> None:
    spaced = json.dumps([event("B", MAIN, 100), event("B", STEP, 200)], indent=1).encode()
    seen, damaged = read_trace(b"\n" + spaced + b"\n", BEGAN_NS, ENDED_NS)
    assert (len(seen), damaged) == (2, 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["ph", "name", "tid", "ts", "args"]), inner)
    ),
)
LIKELY = st.builds(
    event,
    st.sampled_from(["B", "E"]),
    st.sampled_from([ENGINE, MAIN, STEP, FORWARD, ("\0", "", 0)]),
    st.integers(-1, 20_000_000),
    st.integers(1, 3),
)


@given(st.lists(LIKELY | JSON, max_size=40))
def test_any_json_gives_samples_that_make_sense_or_a_count(events: list[Any]) -> None:
    seen, damaged = read(*events)
    assert 0 <= damaged <= 2 * len(events)
    assert seen == sorted(seen, key=lambda each: each.at_ns)
    for each in seen:
        assert BEGAN_NS <= each.at_ns <= ENDED_NS
        assert each.frames
        assert all(f.function.isprintable() and f.file.isprintable() for f in each.frames)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read_trace(data, BEGAN_NS, ENDED_NS)
    except NotATrace:
        return


def test_how_many_samples_there_were() -> None:
    said = b"py-spy> Wrote chrome trace to '/proc/self/fd/5'. Samples: 198 Errors: 0\n"
    assert samples_told(said) == 198
    assert samples_told(b"") is None
    assert samples_told(b"Samples: 99999999999999999999") is None
