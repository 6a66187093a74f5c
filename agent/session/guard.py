"""One part may fail without taking the session along: what it raises becomes a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dsagent.agent.host.procfs import escape

T = TypeVar("T")


def attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """What the call returns, and ""; where it raises, None and why, safe on a terminal."""
    try:
        return call(), ""
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller counts and tells it
        return None, reason_of(error)


def reason_of(error: Exception) -> str:
    """The error in one line, with the place that raised it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = ""
    if frame is not None:
        file = frame.tb_frame.f_code.co_filename.rsplit("/", 1)[-1]
        where = f" ({file}:{frame.tb_lineno})"
    return escape(f"{type(error).__name__}: {error}{where}")
