"""Our pprof, read back by Google's protobuf."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pprof_reader import read_profile

from dsagent.agent.profiles.pprof import CPU, SAMPLES, Row, encode
from dsagent.agent.profiles.stacks import Frame

MAIN = Frame("main", "/srv/main.py", 3)
STEP = Frame("Engine.step", "/srv/loop.py", 190)
OTHER_LINE = Frame("Engine.step", "/srv/loop.py", 191)


def encoded(*rows: Row) -> bytes:
    return encode(
        rows,
        (SAMPLES, CPU),
        period_type=CPU,
        period=50_000_000,
        start_unix_ns=1_700_000_000_000_000_000,
        duration_ns=10_000_000_000,
    )


def test_what_goes_in_comes_out() -> None:
    profile = read_profile(
        encoded(
            Row((MAIN, STEP), (2, 100_000_000), {"phase": "decode", "thread": "engine-loop"}),
            Row((MAIN, OTHER_LINE), (1, 50_000_000), {"phase": "prefill"}),
            Row((MAIN,), (1, 50_000_000)),
        )
    )
    assert profile.types == (("samples", "count"), ("cpu", "nanoseconds"))
    assert profile.period_type == ("cpu", "nanoseconds")
    assert profile.period == 50_000_000
    assert profile.start_unix_ns == 1_700_000_000_000_000_000
    assert profile.duration_ns == 10_000_000_000
    first, second, third = profile.samples
    assert first.frames == (("main", "/srv/main.py", 3), ("Engine.step", "/srv/loop.py", 190))
    assert first.values == {"samples": 2, "cpu": 100_000_000}
    assert first.labels == {"phase": "decode", "thread": "engine-loop"}
    assert second.frames[1] == ("Engine.step", "/srv/loop.py", 191)
    assert third.labels == {}


def test_each_text_is_there_once() -> None:
    profile = read_profile(
        encoded(*(Row((MAIN, STEP), (1, 1), {"phase": "decode"}) for _ in range(50)))
    )
    assert len(set(profile.strings)) == len(profile.strings)
    assert len(profile.samples) == 50


def test_an_empty_profile_is_one() -> None:
    profile = read_profile(encoded())
    assert profile.samples == ()
    assert profile.types == (("samples", "count"), ("cpu", "nanoseconds"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("naïve ünïcode 模型", "naïve ünïcode 模型"),
        ("lone \ud800 surrogate", "lone ? surrogate"),
        ("", ""),
        ("a\0b", "a\0b"),
    ],
)
def test_hostile_names(name: str, expected: str) -> None:
    frame = Frame(name, name, 1)
    (sample,) = read_profile(encoded(Row((frame,), (1, 1), {"thread": name or "x"}))).samples
    assert sample.frames == ((expected, expected, 1),)
    assert sample.labels["thread"] == (expected or "x")


def test_a_label_is_bounded() -> None:
    (sample,) = read_profile(encoded(Row((MAIN,), (1, 1), {"thread": "x" * 10_000}))).samples
    assert len(sample.labels["thread"]) == 128


texts = st.text(max_size=20)
frames = st.builds(Frame, texts, texts, st.integers(0, 2**31))
rows = st.lists(
    st.builds(
        Row,
        st.lists(frames, max_size=6).map(tuple),
        st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**62)),
        st.dictionaries(texts, texts, max_size=3),
    ),
    max_size=8,
)


@given(rows)
def test_whatever_is_given_is_read_back(made: list[Row]) -> None:
    samples = read_profile(encoded(*made)).samples
    for row, read in zip(made, samples, strict=True):
        assert read.frames == tuple((f.function, f.file, f.line) for f in row.frames)
        assert read.values["samples"] == min(max(0, row.values[0]), 2**63 - 1)
        assert read.labels == dict(row.labels)
