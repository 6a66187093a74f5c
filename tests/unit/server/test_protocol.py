"""Strangers' bodies: either a checked request or a refusal that says what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsagent.engine.protocol import ApiError, Ask, parse_ask, parse_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def completion(**fields: Any) -> Ask:
    return parse_ask({**TEXT, **fields}, chat=False, vocab_size=258)


def chat(**fields: Any) -> Ask:
    return parse_ask({**CHAT, **fields}, chat=True, vocab_size=258)


def test_defaults() -> None:
    ask = completion()
    assert (ask.prompt, ask.max_tokens, ask.temperature, ask.top_p) == ("hi", 16, 1.0, 1.0)
    assert (ask.seed, ask.stop, ask.stream, ask.include_usage) == (None, (), False, False)
    assert chat().max_tokens is None


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(("max_tokens", "temperature", "stop", "stream", "seed", "n", "tools"))
    assert completion(**nulls) == completion()


def test_fields_that_ask_for_nothing_are_taken() -> None:
    neutral = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "tools": [], "user": "u"}
    assert chat(**neutral) == chat()
    assert chat(response_format={"type": "text"}) == chat()


def test_both_spellings_of_max_tokens() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=6).max_tokens == 6
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_prompts_of_every_shape() -> None:
    assert completion(prompt=["only"]).prompt == "only"
    assert completion(prompt=[1, 2]).prompt == (1, 2)
    assert completion(prompt=[[1, 2]]).prompt == (1, 2)


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask = chat(messages=[{"role": "developer", "content": parts}])
    assert ask.prompt == ({"role": "system", "content": "ab"},)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"logprobs": 0}, "logprobs"),
        ({"tools": [{}]}, "tools"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"model": None}, "model"),
        ({"model": ["m"]}, "model"),
        ({"model": ""}, "model"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str) -> None:
    for parse in (completion, chat):
        with pytest.raises(ApiError) as refusal:
            parse(**fields)
        assert refusal.value.status == 400
        assert refusal.value.param == param
        assert json.loads(refusal.value.body())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "prompt", [None, 1, [], [1.5], [True], [-1], [258], ["a", "b"], [[1], [2]], [[]], {}, "\ud800"]
)
def test_wrong_prompts(prompt: object) -> None:
    with pytest.raises(ApiError) as refusal:
        completion(prompt=prompt)
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        ["hi"],
        [{"role": "robot", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": "\udc00"}],
    ],
)
def test_wrong_messages(messages: object) -> None:
    with pytest.raises(ApiError) as refusal:
        chat(messages=messages)
    assert (refusal.value.param or "").startswith("messages")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_wrong_json(raw: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_body(raw)
    assert refusal.value.status == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = ("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "stop")


@given(st.dictionaries(st.sampled_from((*FIELDS, "stream", "stream_options", "n")), json_values))
def test_any_object_is_taken_or_refused(fields: dict[str, Any]) -> None:
    for parse in (completion, chat):
        try:
            parse(**fields)
        except ApiError as refusal:
            assert refusal.status == 400


@given(st.binary(max_size=40))
def test_any_bytes_are_taken_or_refused(raw: bytes) -> None:
    try:
        assert isinstance(parse_body(raw), dict)
    except ApiError as refusal:
        assert refusal.status == 400
