"""What --slo makes of the sinks: alerts told to people, figures in every sink that shows any."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from made import TARGET, S, batch
from slo_watch import SEES, Watch, request

from dsagent.agent.outlets import OutletOptions, make_sinks
from dsagent.agent.series import Store
from dsagent.agent.slo_metrics import SloFigures
from dsagent.agent.tenant_header import remark, tenant_header_of

FILE = "slo: [{model: '*', ttft_ms: 500, by: [tenant]}]\n"


def test_alerts_are_told_to_people(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(FILE)
    said: list[str] = []
    (sink,) = make_sinks(OutletOptions(slo=tmp_path / "slo.yaml"), TARGET, said.append)
    assert sink.name == "slo"
    for second in range(60):
        bad = request(bad=second > 20)
        sink.take(replace(batch(5000 * S + second * S, accounts=(bad,)), sources=SEES))
    assert said[0].startswith("page (burning) [*]: time to first token burning ")
    assert "batch.prefill_interference" in said[0]


def test_figures_are_shown_in_each_store() -> None:
    watch = Watch()
    figures, stores = SloFigures(watch.evaluator), (Store(), Store())
    watch.run(1)
    for store in stores:
        figures.show(store)
    assert stores[0].collect() == stores[1].collect() != []


def test_the_server_says_which_header_it_reads() -> None:
    assert tenant_header_of(os.getpid()) == os.environ.get("DSAGENT_TENANT_HEADER", "X-Tenant-Id")
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "DSAGENT_TENANT_HEADER": "X-Team"},
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert remark("x-team", child.pid) is None
        assert remark("X-Tenant-Id", child.pid) == (
            "the SLO file takes tenants from X-Tenant-Id, but the server reads X-Team: start it "
            "with DSAGENT_TENANT_HEADER=X-Tenant-Id"
        )
        child.communicate(b"\n")
    assert remark("X-Other", 2**22 + 5) is None
