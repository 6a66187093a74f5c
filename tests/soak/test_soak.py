"""The soak, cut short: DSAGENT_SOAK_MINUTES says how short (`make soak` takes an hour)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from soak_lab import ran, require_namespaces

HERE = Path(__file__).resolve().parent
MINUTES = float(os.environ.get("DSAGENT_SOAK_MINUTES", "4"))
BEYOND_S = 600  # for starting, the last rounds, and the questions after them

pytestmark = pytest.mark.ebpf


@pytest.mark.timeout(MINUTES * 60 + BEYOND_S + 60)
def test_nothing_grows_is_lost_or_does_not_add_up(tmp_path: Path) -> None:
    require_namespaces()
    out = tmp_path / "soak.json"
    command = (str(HERE / "soak.py"), "--minutes", str(MINUTES), "--out", str(out))
    done = ran(*command, timeout_s=MINUTES * 60 + BEYOND_S)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    document = json.loads(out.read_text())
    assert document["faults"] == []
    # It did happen, and was seen.
    assert document["requests"]["explained"] > 100
    assert document["done"]["engine_killed"] >= 1
    assert document["otlp"]["items"]["traces"] > 0
    assert document["otlp"]["outages"] >= 1
    assert max(value for _, value in document["samples"]["BPF progs"]) > 0
