"""The files for Grafana's provisioning: every way leads to a source that is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from made import account, batch

from dsagent.agent.metrics.aggregate import Aggregate
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.sinks.openmetrics import render
from dsagent.agent.slo import Limits
from dsagent.dashboards.generate import GENERATED, generated

FOLDER = GENERATED.parent / "provisioning"
SOURCES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "datasources.yaml").read_text())[
    "datasources"
]
BY_UID = {source["uid"]: source for source in SOURCES}


def uids_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        here = [v for k, v in value.items() if k == "datasourceUid"]
        return here + [uid for v in value.values() for uid in uids_in(v)]
    if isinstance(value, list):
        return [uid for v in value for uid in uids_in(v)]
    return []


def test_every_way_leads_to_a_source() -> None:
    of = {source["type"]: source for source in SOURCES}
    ways = {kind: [BY_UID[uid]["type"] for uid in uids_in(of[kind])] for kind in of}
    assert ways == {
        "prometheus": ["tempo"],
        "tempo": ["loki", "grafana-pyroscope-datasource"],
        "loki": ["tempo"],
        "grafana-pyroscope-datasource": [],
    }


def test_every_kind_that_a_board_asks_for_is_there() -> None:
    kinds = {
        variable["query"]
        for text in generated().values()
        for variable in json.loads(text)["templating"]["list"]
        if variable["type"] == "datasource"
    }
    assert kinds == {source["type"] for source in SOURCES}


def test_our_exemplars_have_the_label_that_leads_to_the_trace() -> None:
    (metrics,) = (source for source in SOURCES if source["type"] == "prometheus")
    (way,) = metrics["jsonData"]["exemplarTraceIdDestinations"]
    state = Aggregate(Limits(), Sampler(rate=1.0), {})
    state.add(batch(accounts=(account(sampled=True),)))
    assert f'# {{{way["name"]}="' in render(state.collect(), openmetrics=True)


def test_boards_are_read_from_a_folder() -> None:
    (provider,) = yaml.safe_load((FOLDER / "dashboards.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    assert Path(provider["options"]["path"]).is_absolute()
