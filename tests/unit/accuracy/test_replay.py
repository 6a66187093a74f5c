"""Recorded facts give exactly the stored attribution."""

from __future__ import annotations

import collections

from replay import ATTRIBUTION, FACTS, attributed, recorded, stored  # isort: skip  # of the laboratory


def test_the_recorded_facts_are_attributed_as_ever() -> None:
    now, before = attributed(recorded()), stored()
    changed = [
        f"{new['trace_id'][:8]}: {_parts(old)} → {_parts(new)}"
        for new, old in zip(now, before, strict=False)
        if new != old
    ]
    hint = "if this is meant: python tests/accuracy/replay.py --restate"
    told = [f"{len(changed)} of {len(before)} changed; {hint}", *changed[:5]]
    assert not changed, "\n".join(told)
    assert len(now) == len(before)


def test_the_recording_holds_what_it_is_for() -> None:
    top = collections.Counter(account["top_cause"] for account in stored())
    assert {"process.stopped", "cpu.runqueue", "batch.prefill_interference"} <= set(top)


def test_the_fixtures_stay_small() -> None:
    assert FACTS.stat().st_size + ATTRIBUTION.stat().st_size < 300_000


def _parts(account: dict[str, object]) -> str:
    parts = account["parts"]
    assert isinstance(parts, list)
    return ", ".join(f"{part['cause']} {part['ns']}" for part in parts)
