"""W3C Trace Context: where a request's trace comes from, or one made up."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace a request belongs to; `sampled` and the parent are None where none came."""

    trace_id: int
    span_id: int  # of the request's own span
    parent_span_id: int | None
    sampled: bool | None


def random_id(bits: int) -> int:
    """A random id; 0 is not a valid one."""
    return int.from_bytes(os.urandom(bits // 8), "big") or 1


def request_context(traceparent: str | None) -> TraceContext:
    """The context in the header; a random trace where it is absent or invalid.

    As W3C has it: lower-case hex, no id all zero, version 00 with nothing after
    the flags, later ones with whatever they add after a dash, never version ff.
    """
    match = _TRACEPARENT.fullmatch(traceparent.strip(" \t")) if traceparent else None
    if match is not None:
        version, trace_id, parent_id, flags, more = match.groups()
        valid = version != "ff" and not (version == "00" and more is not None)
        if valid and int(trace_id, 16) and int(parent_id, 16):
            return TraceContext(
                trace_id=int(trace_id, 16),
                span_id=random_id(64),
                parent_span_id=int(parent_id, 16),
                sampled=bool(int(flags, 16) & _SAMPLED),
            )
    return TraceContext(random_id(128), random_id(64), None, None)
