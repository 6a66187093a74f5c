"""`dsagent fleet measure` on the real engine for a few seconds, `fleet size` on what it found, and
the same recording's way through roll, retain and sql by their commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_recordings import HOUR, write_recording
from made import S

COMMAND = str(Path(sys.executable).with_name("dsagent"))
POLICY = str(Path(__file__).resolve().parents[2] / "deploy" / "fleet" / "7-90.toml")


def dsagent(*argv: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSAGENT_", "OTEL_"))}
    return subprocess.run(
        [COMMAND, *argv], env=kept, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.smollm2
def test_a_pod_is_measured_and_a_fleet_sized_by_it(tmp_path: Path) -> None:
    ran = dsagent("fleet", "measure", "--duration", "14", "--json")  # a sampler's run is 10 s
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["requests_per_s"] > 0
    assert 100 < found["series"] <= found["series_estimated"]
    assert 0 <= found["kept_ratio"] <= 1
    # The request, its queue, prefill and decode, and steps.
    assert found["spans_per_kept_request"] > 4
    assert 20 < found["span_wire_bytes"] < found["span_raw_bytes"]
    assert found["rolled_bytes_per_s"] > 0
    assert found["pushes_per_s"] > 0
    assert found["push_wire_bytes"] > 100
    mine = tmp_path / "mine.json"
    mine.write_text(ran.stdout)
    sized = json.loads(dsagent("fleet", "size", "--measured", str(mine), "--json").stdout)
    assert sized["measured"] == found
    series = next(line for line in sized["lines"] if line["what"] == "time series")
    assert series["value"] == 10_000 * found["series"]


def test_rolled_retained_and_asked_by_the_commands(tmp_path: Path) -> None:
    recording = write_recording(tmp_path / "rec", (0, HOUR, HOUR + 10 * S))
    store = str(tmp_path / "store")
    rolled = dsagent("roll", str(recording), store, "--pod", "pod-1")
    assert rolled.returncode == 0, rolled.stderr
    assert "3 segments rolled" in rolled.stdout
    asked = json.loads(dsagent("fleet", "sql", store, "slowest", "--json").stdout)
    assert len(asked["rows"]) == 6
    dry = dsagent("retain", store, "--policy", POLICY, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "would go" in dry.stdout
    kept = json.loads(dsagent("retain", store, "--policy", POLICY, "--json").stdout)
    # Years old: added up, then deleted from both tiers, in one run.
    assert kept["batches_added_up"] == 2
    assert {each["tier"] for each in kept["deleted"]} == {"raw", "rolled", "hourly", "aggregated"}
    assert list(Path(store).iterdir()) == []
    for wrong in (
        ("roll", str(tmp_path / "none"), store),
        ("roll", str(recording), store, "--pod", "a/b"),
        ("retain", store, "--policy", str(tmp_path / "none.toml")),
        ("fleet", "sql", store),
        ("fleet", "sql", store, "SELEKT"),
        ("fleet", "size", store),
        ("fleet", "size", "--measured", POLICY),
        ("fleet", "size", "--kept", "lots"),
    ):
        ran = dsagent(*wrong)
        assert ran.returncode == 2, wrong
        assert ran.stderr.startswith("dsagent: "), ran.stderr
        assert ran.stderr.count("\n") == 1, ran.stderr
        assert ran.stdout == ""
