"""What is committed is what the example makes; promtool accepts it, and finds what is broken."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from made import MS, series_names

from dsagent.agent.attribution.account import CAUSES
from dsagent.agent.metrics.catalog import CATALOGUE
from dsagent.agent.screens.remedies import REMEDIES
from dsagent.agent.slo.causes import OWN_WORK, UNFINISHED
from dsagent.agent.slo.file import SloFile, load_slo
from dsagent.agent.slo.limits import Limit, Limits
from dsagent.agent.slo.presets import PRESETS
from dsagent.dashboards import rules, rules_runbooks
from dsagent.dashboards.rules_promtool import promtool_errors

EXAMPLE = load_slo(rules.EXAMPLE)
SMALL = SloFile(Limits((Limit("tiny*", ttft_ns=250 * MS, objective_ratio=0.9),)))
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here (apt install prometheus)"
)


def alerts(texts: dict[str, str]) -> list[dict[str, Any]]:
    document = yaml.safe_load(texts[rules.RULES])
    return [r for group in document["groups"] for r in group["rules"] if "alert" in r]


def test_what_is_committed_is_what_the_example_makes() -> None:
    why = "run: python -m dsagent.dashboards.rules"
    assert rules.differences(rules.files(EXAMPLE), rules.GENERATED) == [], why
    assert rules.differences(rules_runbooks.pages(), rules.RUNBOOKS) == [], why
    made = {Path(name) for name in rules.files(EXAMPLE)}
    there = {p.relative_to(rules.GENERATED) for p in rules.GENERATED.glob("*/*")}
    assert there == made
    assert {p.name for p in rules.RUNBOOKS.iterdir()} == set(rules_runbooks.pages())


def test_a_difference_is_found(tmp_path: Path) -> None:
    texts = rules.files(SMALL)
    rules.write(texts, tmp_path)
    assert rules.differences(texts, tmp_path) == []
    (tmp_path / rules.RULES).write_text("# other")
    (tmp_path / rules.GRAFANA).unlink()
    (tmp_path / rules.TESTS).write_bytes(b"\xff")
    assert [each.split(": ", 1)[1] for each in rules.differences(texts, tmp_path)] == [
        "is not what the SLO file makes; run dsagent slo generate",
        "not a text",
        "No such file or directory",
    ]


@needs_promtool
@pytest.mark.parametrize("divided_by", [1.0, 60.0])
def test_promtool_accepts_rules_and_their_tests_scaled_or_not(divided_by: float) -> None:
    file = replace(SMALL, windows_divided_by=divided_by, cache=EXAMPLE.cache)
    assert promtool_errors(rules.files(file)) == []


@needs_promtool
def test_an_objective_of_100_has_rules_that_hold() -> None:
    limit = Limit("*", ttft_ns=250 * MS, name='"so\\`%s', objective_ratio=1.0)
    assert promtool_errors(rules.files(SloFile(Limits((limit,))))) == []


@needs_promtool
def test_promtool_accepts_what_is_committed(tmp_path: Path) -> None:
    """Its tests are those of the same generator, tried above on less: they take long."""
    texts = rules.files(EXAMPLE)
    without_tests = "rule_files: [dsagent-slo.yaml]\nevaluation_interval: 1m\ntests: []\n"
    assert promtool_errors({**texts, rules.TESTS: without_tests}) == []


@needs_promtool
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("unless on", "and on"),  # resolved as soon as the load stops
        ("dsagent_slo_bad_total[", "dsagent_slo_worse_total["),
        ("increase(", "increase(("),
    ],
)
def test_broken_rules_do_not_pass(old: str, new: str) -> None:
    texts = rules.files(SMALL)
    assert old in texts[rules.RULES]
    broken = {**texts, rules.RULES: texts[rules.RULES].replace(old, new)}
    assert promtool_errors(broken)


def test_the_prometheus_operator_gets_the_same_rules_and_kustomize_finds_them() -> None:
    texts = rules.files(EXAMPLE)
    made = yaml.safe_load(texts[rules.OPERATOR])
    assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert made["spec"] == yaml.safe_load(texts[rules.RULES])
    folder = Path(rules.KUSTOMIZATION).parent
    (listed,) = yaml.safe_load(texts[rules.KUSTOMIZATION])["resources"]
    assert str(folder / listed) == rules.OPERATOR


def test_rules_ask_only_for_metrics_that_there_are() -> None:
    series = {name for metric in CATALOGUE for name in series_names(metric)}
    document = yaml.safe_load(rules.files(EXAMPLE)[rules.RULES])
    every = [rule for group in document["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in every if "record" in rule}
    for rule in every:
        text = re.sub(r'"[^"]*"', "", rule["expr"])
        names = set(re.findall(r"\b(?:dsagent_|cache_|slo:)[\w:]+", text)) - {"cache_name"}
        assert names
        assert names <= series | recorded, rule["expr"]


def test_each_alert_says_where_its_runbook_is() -> None:
    for alert in alerts(rules.files(EXAMPLE)):
        url = alert["annotations"]["runbook_url"]
        assert (rules.HERE.parent / url).is_file(), url
        assert alert["labels"]["severity"] in ("page", "ticket")


def test_grafana_rules_are_complete_and_have_uids_of_their_own() -> None:
    document = yaml.safe_load(rules.files(EXAMPLE)[rules.GRAFANA])
    made = [rule for group in document["groups"] for rule in group["rules"]]
    assert document["apiVersion"] == 1
    uids = [rule["uid"] for rule in made]
    assert len(set(uids)) == len(uids)
    assert all(len(uid) <= 40 and re.fullmatch(r"[\w-]+", uid) for uid in uids)
    for rule in made:
        assert rule["condition"] in [query["refId"] for query in rule["data"]]
        assert rule["noDataState"] in ("KeepLast", "Alerting")
        query = rule["data"][0]
        assert query["datasourceUid"] == "$DSAGENT_PROMETHEUS_UID"
        assert "$" not in query["model"]["expr"].replace("$$", "")
        for text in (*rule["annotations"].values(), *rule["labels"].values()):
            assert "$" not in text.replace("$$", "")


@needs_promtool
def test_grafanas_expressions_parse() -> None:
    document = yaml.safe_load(rules.files(EXAMPLE)[rules.GRAFANA])
    exprs = [r["data"][0]["model"]["expr"] for g in document["groups"] for r in g["rules"]]
    recorded = [{"record": f"tried:{i}", "expr": expr} for i, expr in enumerate(exprs)]
    texts = {
        rules.RULES: yaml.safe_dump({"groups": [{"name": "g", "rules": recorded}]}),
        rules.TESTS: "rule_files: []\ntests: []\n",
    }
    assert promtool_errors(texts) == []


def test_each_cause_has_a_remedy() -> None:
    assert set(REMEDIES) == {*CAUSES, "unattributed", UNFINISHED, OWN_WORK}


def test_every_preset_makes_a_file(tmp_path: Path) -> None:
    entries = [{"model": f"{name}*", "preset": name} for name in PRESETS]
    path = tmp_path / "slo.yaml"
    path.write_text(yaml.safe_dump({"slo": entries}))
    limits = load_slo(path).limits
    assert {e.model: (e.ttft_ns, e.tpot_ns) for e in limits.entries} == {
        f"{name}*": (ttft_ms * MS, tpot_ms * MS) for name, (ttft_ms, tpot_ms) in PRESETS.items()
    }
