"""Trace context as W3C has it."""

from __future__ import annotations

import pytest

from dsagent.instrumentation.context import request_context

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"00-{TRACE}-{PARENT}-fe", False),
        (f" 00-{TRACE}-{PARENT}-01\t", True),
        (f"cc-{TRACE}-{PARENT}-01", True),  # a later version
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-brings", True),
    ],
)
def test_a_valid_header_is_taken_over(header: str, sampled: bool) -> None:
    context = request_context(header)
    assert context.trace_id == int(TRACE, 16)
    assert context.parent_span_id == int(PARENT, 16)
    assert context.sampled is sampled
    assert context.span_id not in (0, int(PARENT, 16))


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01.",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\n00",
        f"٠٠-{TRACE}-{PARENT}-01",
        f"00_{TRACE}_{PARENT}_01",
    ],
)
def test_an_invalid_one_is_as_good_as_none(header: str | None) -> None:
    context = request_context(header)
    assert context.parent_span_id is None
    assert context.sampled is None
    assert context.trace_id not in (0, int(TRACE, 16))
    assert request_context(header).trace_id != context.trace_id
