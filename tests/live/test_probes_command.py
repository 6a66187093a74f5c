"""`dsagent probes` on this machine: what it lists, and how it degrades."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_lab import Child, Watch, require_kernel_source

from dsagent.agent.checks import trial
from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Kind
from dsagent.agent.probes import OBJECTS, OUTSIDE_PROBES, PROBES
from dsagent.agent.sources.bpf.libbpf import BpfObject, Library

pytestmark = pytest.mark.ebpf

COMMAND = str(Path(sys.executable).with_name("dsagent"))


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()


def test_the_command_lists_every_probe_with_state_meaning_and_cost() -> None:
    ran = subprocess.run(
        [COMMAND, "probes", "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    document = json.loads(ran.stdout)
    probes = {probe["name"]: probe for probe in document["probes"]}
    assert list(probes) == [probe.name for probe in (*PROBES, *OUTSIDE_PROBES)]
    assert all(probes[probe.name]["cost_ns"] for probe in OUTSIDE_PROBES)
    for probe in probes.values():
        assert set(probe) == {"name", "tier", "state", "reason", "measures", "cost_ns"}
        assert (probe["state"] == "ok") == (probe["reason"] == "")
        assert probe["cost_ns"] is None or 0 < probe["cost_ns"] < 1_000_000
    working = [probe for probe in probes.values() if probe["state"] == "ok"]
    assert len(working) >= 20
    assert all(probes[name]["cost_ns"] for name in ("cpu.runqueue", "memory.minor_fault"))
    assert ran.returncode == int(any(p["state"] == "failed" for p in probes.values()))


def test_what_the_kernel_lacks_or_refuses_is_left_out_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments_of, load = Library.arguments_of, BpfObject.load
    lacks = ("mm_vmscan_memcg_reclaim_begin", "local_timer_entry")
    monkeypatch.setattr(
        Library,
        "arguments_of",
        lambda self, name: None if name in lacks else arguments_of(self, name),
    )

    def refuse_net(loaded: BpfObject) -> None:
        if "net.bpf.o" in str(loaded._path):
            raise SourceUnavailable("net.bpf.o cannot be loaded: no")
        load(loaded)

    monkeypatch.setattr(BpfObject, "load", refuse_net)
    tried = {each.probe.name: each for each in trial.try_probes()}
    assert tried["memory.reclaim"].state == "unavailable"
    assert tried["memory.reclaim"].reason == (
        "this kernel has no tracepoint mm_vmscan_memcg_reclaim_begin"
    )
    assert tried["net.retransmit"].state == tried["net.backpressure"].state == "failed"
    assert tried["net.retransmit"].cost_ns is None
    others = set(tried) - {"memory.reclaim", "net.retransmit", "net.backpressure"}
    assert {tried[name].state for name in others} == {"ok"}  # cpu.irq without the timer's

    body = "say(ready=True); hear(); nap(20_000); say(end=now()); hear()"
    with Child(body) as child:
        child.hear()
        with Watch(child.pid) as watch:
            child.say()
            watch.until(child.hear()["end"])
            status = watch.source.status()
    assert len(watch.of(Kind.OFF_OTHER, tid=child.pid, least_ns=1_000_000)) == 1
    assert status.state == "ok"
    assert "not measured: memory.reclaim (this kernel has no tracepoint" in status.reason


def test_without_permission_all_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise SourceUnavailable("not permitted")

    monkeypatch.setattr(trial, "check", refuse)
    tried = trial.try_probes()
    assert len(tried) == len(PROBES) > 0 and len(OBJECTS) > 1
    assert {(each.state, each.reason, each.cost_ns) for each in tried} == {
        ("unavailable", "not permitted", None)
    }
