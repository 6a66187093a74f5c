"""Pieces add up to the whole, wherever they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsagent.engine.detokenizer import Detokenizer, StopStrings

BYTES = [bytes([value]) for value in range(256)]


@given(st.binary(max_size=64))
def test_pieces_add_up_to_the_full_decoding(data: bytes) -> None:
    detokenizer = Detokenizer(BYTES)
    pieces = [detokenizer.push([value]) for value in data]
    assert "".join(pieces) + detokenizer.finish() == data.decode("utf-8", "replace")


@given(st.text(max_size=40))
def test_whole_characters_never_come_out_as_halves(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    pieces = [detokenizer.push([value]) for value in text.encode()]
    assert "".join(pieces) == text
    assert detokenizer.finish() == ""
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def test_a_character_cut_off_by_the_end_is_marked() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push("🙂".encode()[:3]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_an_id_beyond_the_vocabulary_stands_for_nothing() -> None:
    assert Detokenizer(BYTES).push([ord("a"), 999, ord("b")]) == "ab"


def _cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The plain definition: cut before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_do_not_depend_on_where_the_pieces_are_cut(
    pieces: list[str], stops: list[str]
) -> None:
    stop_strings = StopStrings(stops)
    out = [stop_strings.push(piece) for piece in pieces]
    text = "".join(out) + stop_strings.finish()
    assert (text, stop_strings.stopped) == _cut("".join(pieces), stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["one ST", "OP two"], ["STOP"], "one "),
        (["one ST", "ART two"], ["STOP"], "one START two"),
        (["a\n", "\nb"], ["\n\n", "b"], "a"),
        (["aaa", "b"], ["aab"], "a"),
    ],
)
def test_stop_strings_across_pieces(pieces: list[str], stops: list[str], expected: str) -> None:
    stop_strings = StopStrings(stops)
    out = "".join(stop_strings.push(piece) for piece in pieces)
    assert out + stop_strings.finish() == expected


def test_text_is_held_back_no_longer_than_needed() -> None:
    stop_strings = StopStrings(["END"])
    assert stop_strings.push("hello E") == "hello "
    assert stop_strings.push("N") == ""
    assert stop_strings.push("vy") == "ENvy"
