"""What --slo makes of the sinks: alerts told to people, figures in every sink that shows any."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from made import S, batch
from slo_watch import SEES, Watch, request

from dsagent.agent.metrics.series import Store
from dsagent.agent.metrics.slo_metrics import SloFigures
from dsagent.agent.session.outlets import Judged, OutletOptions, make_sinks
from dsagent.agent.sinks.openmetrics import render
from dsagent.agent.sinks.prometheus import PrometheusSink
from dsagent.agent.slo import load_slo
from dsagent.agent.tenant_header import remark, tenant_header_of
from dsagent.dashboards.rules import RULES, files

FILE = "slo: [{model: '*', ttft_ms: 500, by: [tenant]}]\n"


def test_alerts_are_told_to_people(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(FILE)
    said: list[str] = []
    options = OutletOptions(slo=tmp_path / "slo.yaml")
    (sink,) = make_sinks(options, Judged(options, said.append))
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


def test_a_store_that_is_done_with_is_not_kept() -> None:
    """Those of one attachment: an engine that crashes again and again would fill the memory."""
    watch = Watch()
    figures, store = SloFigures(watch.evaluator), Store()
    watch.run(1)
    figures.show(store)
    seen = weakref.ref(store)
    del store
    gc.collect()
    assert seen() is None


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


def test_rules_find_what_a_scrape_shows(tmp_path: Path) -> None:
    """Every metric of ours that the rules ask for is there, with the labels that they match."""
    (tmp_path / "slo.yaml").write_text(
        "prompt_classes: [16]\n"
        "slo: [{model: '*', ttft_ms: 500, errors_objective: 99, by: [tenant, prompt_class]}]\n"
        "cache: [{preset: bypass}]\n"
    )
    options = OutletOptions(slo=tmp_path / "slo.yaml", prometheus="127.0.0.1:0")
    slo, prometheus = make_sinks(options, Judged(options, lambda _line: None))
    assert isinstance(prometheus, PrometheusSink)
    for second in range(30):
        made = request(bad=second > 10, tenant="acme", prompt_tokens=64)
        each = replace(batch(5000 * S + second * S, accounts=(made,)), sources=SEES)
        slo.take(each)
        prometheus.take(each)
    lines = render(prometheus.collect(), openmetrics=False).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    shown = {name.split("{")[0] for name in values}
    series = (
        'slo="*",objective="ttft",gen_ai_request_model="tiny-llama",tenant="acme",'
        'prompt_class="gt_16"'
    )
    cause = 'cause="batch.prefill_interference"'
    expected = {
        f"dsagent_slo_events_total{{{series}}}": 30,
        f"dsagent_slo_bad_total{{{series}}}": 19,
        f'dsagent_slo_state{{{series},state="page"}}': 1,
        f'dsagent_slo_state{{{series},state="ok"}}': 0,
        f"dsagent_slo_objective_ratio{{{series}}}": 0.99,
        f"dsagent_slo_burnt_cause_seconds_total{{{series},{cause}}}": 19 * 0.6,
        f'dsagent_slo_burn_rate_ratio{{{series},window="15s"}}': 1 / 0.01,
        "dsagent_slo_blind": 0,
        'dsagent_slo_cache_circuit{cache_name="prefix",action="bypass"}': 0,
        'dsagent_slo_cache_hit_ratio{cache_name="prefix",action="bypass"}': 0.25,
    }
    assert {name: float(values[name]) for name in expected} == pytest.approx(expected)
    document = yaml.safe_load(files(load_slo(tmp_path / "slo.yaml"))[RULES])
    exprs = [rule["expr"] for group in document["groups"] for rule in group["rules"]]
    asked = {name for expr in exprs for name in re.findall(r"\bdsagent_\w+", expr)}
    asked = {name for name in asked if f":{name}:" not in "".join(exprs)}
    assert len(asked) == 4
    assert asked <= shown
