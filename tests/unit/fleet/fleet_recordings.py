"""Recordings of pods, written by the real sink: a segment for each moment asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from made import ANCHOR, S, account, batch, step

from dsagent.agent.attribution.account import Account, Part
from dsagent.agent.facts import Event
from dsagent.agent.sinks.recording import RecordingSink

HOUR = 3600 * S
# 2023-11-14T22:00 UTC on the monotonic clock of `made`.
TEN_PM_NS = ANCHOR.mono_ns + (1_699_999_200 * S - ANCHOR.unix_ns)
LATER_UNIX_NS = 1_699_999_200 * S + 100 * HOUR  # all hours below are over


def write_recording(
    folder: Path,
    at_ns: Sequence[int],
    accounts: Callable[[int], tuple[Account, ...]] | None = None,
) -> Path:
    """A segment for each moment after ten in the evening."""
    for number, offset_ns in enumerate(at_ns, 1):
        begun_ns = TEN_PM_NS + offset_ns
        sink = RecordingSink(folder)
        sink.start()
        mine = accounts(number) if accounts is not None else usual_accounts(number, begun_ns)
        sink.take(
            batch(
                now_ns=begun_ns,
                accounts=mine,
                steps=(step(number, (f"req-{number}",), start_ns=begun_ns - S),),
                events=(Event("engine.stalled", begun_ns, "by bob@example.com", {"by": "pipe"}),),
            )
        )
        sink.stop(10.0)
        assert sink.status().failed == sink.status().dropped == 0, sink.status()
    return folder


def usual_accounts(number: int, ended_ns: int) -> tuple[Account, ...]:
    """Two requests of 1 s that end then; the second is another tenant's and waited for a lock."""
    first = account(f"req-{number}", start_ns=ended_ns - 2 * S)
    second = account(
        f"other-{number}", start_ns=ended_ns - 2 * S, tenant="mail alice@example.com", model="qwen"
    )
    waited = Part("lock.wait", second.unattributed_ns, "measured")
    return first, replace(second, parts=(*second.parts, waited), unattributed_ns=0)
