"""What goes out in place of personal data and secrets, and what stays as it is."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsagent.agent.masking import MAX_CHARS, mask, mask_command


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("mail ada.lovelace+x@example.co.uk now", "mail [email] now"),
        ("Authorization: Bearer abc.def-ghi_jkl", "Authorization: Bearer [secret]"),
        ("authorization=Basic dXNlcjpwYXNz", "authorization=Basic [secret]"),
        ("vllm serve --api-key s3cret-value x", "vllm serve --api-key [secret] x"),
        ("authorization: token abc-123", "authorization: token [secret]"),
        ("HF_TOKEN=abcdefgh", "HF_TOKEN=[secret]"),
        ('{"api_key": "abc", "n": 1}', '{"api_key": "[secret]", "n": 1}'),
        ("PASSWORD=hunter2;x", "PASSWORD=[secret];x"),
        ("key sk-proj-abcdefghijklmnop1234 used", "key [secret] used"),
        ("hf_abcdefghijklmnopqrst", "[secret]"),
        ("AKIAIOSFODNN7EXAMPLE", "[secret]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "[secret]"),
        ("http://user:pa55word@host/x", "http://[secret]@host/x"),
        ("from 203.0.113.9:4711", "from [ip]:4711"),
        ("peer 2001:db8::1 left", "peer [ip] left"),
        ("fe80::1%eth0", "[ip]"),
        ("call +49 170 1234567", "call [phone]"),
        ("call +1 (415) 555-0132 now", "call [phone] now"),
        ("call (415) 555-0132", "call [phone]"),
        ("call 415-555-0132.", "call [phone]."),
    ],
)
def test_what_is_found(text: str, masked: str) -> None:
    assert mask(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Slow because: 62% waiting behind others' prefill (most of all request cmpl-1234567890).",
        "step 1234567890 has run for 12.3 s",
        "0123456789abcdef0123456789abcdef",
        "4f3c2d1e-0000-4000-8000-123456789012",
        "process 1234567 at 2026-11-29T18:50:01.123456",
        "std::vector<int>::at in torch::autograd::Engine",
        "connection to 127.0.0.1:4318 and [::1]:80 refused; 0.0.0.0 too",
        "the first token generated after 8 s; password required; basic authentication",
        "time per output token: 35.1 ms, token=12",
        "took 1700000000000000000 ns",
        "the interpreter's lock, held by token-loop",
        "1024 tokens, 8 secrets none",
        "VLLM::EngineCor",
    ],
)
def test_what_stays(text: str) -> None:
    assert mask(text) == text


IDENTIFIER = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=3, max_size=20)
AROUND = st.text(st.characters(codec="utf-8", exclude_characters="@.:%+-_"), max_size=60)


@given(AROUND, IDENTIFIER, IDENTIFIER, AROUND)
def test_no_address_survives_whatever_stands_around_it(
    before: str, user: str, host: str, after: str
) -> None:
    assert f"{user}@{host}" not in mask(f"{before} {user}@{host}.org {after}")


@given(AROUND, IDENTIFIER, st.sampled_from(["api_key", "apikey", "Password", "X-API-Key", "token"]))
def test_no_named_secret_survives(before: str, value: str, name: str) -> None:
    secret = f"Zq{value}9"
    for separator in ("=", ": ", " = "):
        assert secret not in mask(f"{before} {name}{separator}{secret}")


@given(AROUND, st.ip_addresses())
def test_no_address_of_a_machine_survives(before: str, address: object) -> None:
    text = str(address)
    is_own = getattr(address, "is_loopback", False) or getattr(address, "is_unspecified", False)
    if not is_own:
        assert text not in mask(f"{before} {text} ")


@given(st.text(max_size=300))
def test_masking_again_changes_nothing(text: str) -> None:
    assert mask(mask(text)) == mask(text)


@given(st.text(), st.integers(0, 3000))
def test_it_is_bounded(text: str, times: int) -> None:
    assert len(mask(text * times)) <= MAX_CHARS


@given(st.integers(0, 2**128 - 1), st.integers(0, 2**64 - 1))
def test_ids_of_traces_and_numbers_stay(trace_id: int, number: int) -> None:
    text = f"trace {trace_id:032x} span {number & (2**64 - 1):016x} took {number} ns"
    assert mask(text) == text


@pytest.mark.parametrize(
    "piece", ["a", "a.", "a@", "@", "1.", "1", "+1 ", "::", "key=", "token ", "eyJa", "://:", "a%"]
)
def test_no_text_takes_long(piece: str) -> None:
    """What makes a careless expression try everything: it would take minutes, not milliseconds."""
    began_s = time.process_time()
    mask(piece * (1_000_000 // len(piece)))
    assert time.process_time() - began_s < 5


@given(
    st.text(),
    st.sampled_from(["--api-key={}", "--my.token={}", "API_KEY={}", "Authorization: {}", "--p"]),
)
def test_a_secret_in_a_command_line_goes_whole_whatever_it_is_made_of(value: str, way: str) -> None:
    value = f"hunter {value} two"
    words = ["--password", value] if way == "--p" else [way.format(value)]
    assert not {"hunter", "two"} & set(mask_command(["/bin/x", *words, "last"]).split())


def test_a_long_command_line_is_cut_soon() -> None:
    assert len(mask_command(["x" * 1000] * 1_000_000)) <= MAX_CHARS
