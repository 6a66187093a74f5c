"""The hooks on vLLM's own scheduler, driven without a model: what no server on a CPU does."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_lab import ENVIRONMENT, MODELS

DRIVER = Path(__file__).with_name("drive_scheduler.py")


def driven(plugged: Any, scenario: str) -> list[dict[str, Any]]:
    ran = subprocess.run(
        [plugged.overlay.path / "bin" / "python", DRIVER, MODELS / "smollm2", scenario],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    document = json.loads(ran.stdout.splitlines()[-1])
    assert document["failures"] == 0
    steps = document["steps"]
    assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
    return list(steps)


def test_asynchronous_scheduling_overlaps_steps(plugged: Any) -> None:
    steps = driven(plugged, "overlapping")
    assert len(steps) == 4
    for before, after in pairwise(steps):
        assert before["start_ns"] < after["start_ns"] < before["end_ns"] < after["end_ns"]
        executed = after["start_ns"] + after["schedule_ns"] + after["prepare_ns"]
        # Executed from when the step before came back.
        assert executed == before["end_ns"] - before["output_ns"]
    for step in steps:
        assert [share["output_tokens"] for share in step["shares"]] == [1, 1]
    contexts = [[share["context_tokens"] for share in step["shares"]] for step in steps]
    assert contexts == [[0, 0], [20, 30], [21, 31], [22, 32]]
    assert [step["prefill_tokens"] for step in steps] == [50, 0, 0, 0]


def test_speculative_tokens(plugged: Any) -> None:
    steps = driven(plugged, "speculative")
    shares = [share for step in steps for share in step["shares"]]
    assert sum(share["output_tokens"] for share in shares) == 8
    assert [share["scheduled_tokens"] for share in shares][:3] == [20, 4, 4]
    assert [share["output_tokens"] for share in shares][:3] == [1, 2, 2]
    assert [share["context_tokens"] for share in shares][:3] == [0, 20, 22]
