"""The committed boards are the generated ones, and ask only for what the catalogue has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made import series_names

from dsagent.agent.metrics.catalog import CATALOGUE
from dsagent.dashboards.generate import GENERATED, generated

BOARDS = {name: json.loads(text) for name, text in generated().items()}
# Words of PromQL that are no metrics, where no bracket follows them.
WORDS = {"by", "without", "ignoring", "on", "group_left", "group_right", "bool", "and", "or"}
SERIES = {name for metric in CATALOGUE for name in series_names(metric)}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those that show data."""
    for panel in board["panels"]:
        if panel["type"] not in ("row", "text"):
            yield panel


def expressions() -> list[str]:
    return [
        target["expr"]
        for board in BOARDS.values()
        for panel in panels(board)
        for target in panel["targets"]
        if target["datasource"]["type"] == "prometheus"
    ]


def metrics_in(expr: str) -> set[str]:
    """The names in an expression that are neither functions, labels nor PromQL's own words."""
    text = re.sub(r'"[^"]*"', "", expr)
    text = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", text)
    text = re.sub(r"\b(by|without|ignoring|on|group_left|group_right)\s*\([^)]*\)", "", text)
    found = re.findall(r"(?<![\w$.])([a-zA-Z_:][\w:]*)\b(?!\s*\()", text)
    return set(found) - WORDS


def test_what_is_committed_is_what_is_generated() -> None:
    committed = {path.name: path.read_text() for path in GENERATED.glob("*.json")}
    assert committed == generated(), "run dsagent dashboards generate"


def test_there_is_a_board_for_each_question() -> None:
    assert len(BOARDS) >= 8
    assert {board["title"].split(": ")[0] for board in BOARDS.values()} == {"dsagent"}


def test_names_are_found_in_expressions() -> None:
    expr = 'sum by (le) (rate(a_bucket{b="c"}[5m])) / ignoring(x) group_left sum(d:e) > 0'
    assert metrics_in(expr) == {"a_bucket", "d:e"}


def test_only_metrics_of_the_catalogue_are_asked_for() -> None:
    assert len(expressions()) > 15
    for expr in expressions():
        assert metrics_in(expr), expr
        assert metrics_in(expr) <= SERIES, expr
    for board in BOARDS.values():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                name = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
                assert name is not None
                assert name[1] in SERIES
                assert name[2] in labels_of(name[1])


# Why a metric is on no board of ours.
ON_NO_BOARD = {
    "dsagent.slo.objective": "a setting",
    "dsagent.slo.blind": "shown as a state of the objectives",
    "dsagent.sink.made": "the sum of what is shown: queued, sent, dropped",
    "dsagent.sidecar.": "of several engines; its own report tells them",
    "dsagent.otlp_receiver.": "what came of the spans is shown",
    "dsagent.served.": "of the engine's own figures those that the agent does not know better",
    "dsagent_reference_": "the agent knows it of any engine",
    "hw.gpu.memory.usage": "shown as a ratio",
    "hw.gpu.memory.limit": "likewise",
    "hw.energy": "shown as power",
    "process.thread.count": "for whoever looks for a leak",
    "process.unix.file_descriptor.count": "likewise",
    "process.disk.io": "what it delays is shown",
    "target_info": "the boards' variables are made of it",
}


def test_every_metric_is_on_a_board_or_there_is_a_reason_why_not() -> None:
    asked = {name for expr in expressions() for name in metrics_in(expr)}
    missing = {each.name for each in CATALOGUE if not asked & series_names(each)}
    unexplained = {name for name in missing if not name.startswith(tuple(ON_NO_BOARD))}
    assert not unexplained
    assert all(any(name.startswith(start) for name in missing) for start in ON_NO_BOARD)


def labels_of(series: str) -> set[str]:
    (metric,) = (each for each in CATALOGUE if series in series_names(each))
    labels = {name.replace(".", "_") for name in metric.attributes} | {"instance"}
    return labels | {"le"} if series.endswith("_bucket") else labels


def test_labels_are_those_of_the_metrics() -> None:
    for expr in expressions():
        for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expr):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert used <= labels_of(name), expr


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_complete(name: str) -> None:
    board = BOARDS[name]
    assert "uid" not in board
    assert board["schemaVersion"] >= 36
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in panels(board)]
    assert len(titles) == len(set(titles))
    for panel in panels(board):
        title = panel["title"]
        assert panel["datasource"]["uid"].startswith("${"), title
        assert panel["description"].endswith("."), title
        letters = [target["refId"] for target in panel["targets"]]
        assert all(letters), title
        assert len(letters) == len(set(letters)), title
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"], title
        if panel["datasource"]["type"] == "prometheus":
            assert panel["fieldConfig"]["defaults"]["unit"], title


@pytest.mark.parametrize("name", BOARDS)
def test_buckets_are_in_numeric_order_and_heatmaps_have_units(name: str) -> None:
    for panel in panels(BOARDS[name]):
        if panel["type"] != "heatmap":
            continue
        title, options = panel["title"], panel["options"]
        assert options["yAxis"]["unit"], title
        assert options["calculate"] is False, title
        (target,) = panel["targets"]
        if "_bucket" in target["expr"] and target["expr"].startswith("sum by (le)"):
            assert target["format"] == "heatmap", title  # Grafana orders these by bound
            assert target["exemplar"], title
        else:
            assert target["format"] == "time_series", title
            assert "le" not in target["legendFormat"].strip("{}").split(), title


@pytest.mark.parametrize("name", BOARDS)
def test_every_variable_that_is_used_is_there(name: str) -> None:
    board = BOARDS[name]
    there = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(board["panels"])))
    assert used <= there, used - there
    kinds = {
        v["name"]: v["query"] for v in board["templating"]["list"] if v["type"] == "datasource"
    }
    for panel in panels(board):
        assert kinds[panel["datasource"]["uid"][2:-1]] == panel["datasource"]["type"]


@pytest.mark.parametrize("name", BOARDS)
def test_the_first_thing_says_how_to_read_it(name: str) -> None:
    first = BOARDS[name]["panels"][0]
    assert first["type"] == "text"
    assert first["gridPos"] == {"h": 4, "w": 24, "x": 0, "y": 0}
    assert 200 < len(first["options"]["content"]) < 700


@pytest.mark.parametrize("name", BOARDS)
def test_panels_fill_the_width_and_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    deepest = 0
    for panel in BOARDS[name]["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        deepest = max(deepest, at["y"] + at["h"])
    assert len(taken) == 24 * deepest, "there are holes"


def test_the_cache_is_red_at_0_and_green_at_100_percent_by_cells_of_5_minutes() -> None:
    (panel,) = (
        panel
        for panel in panels(BOARDS["dsagent-cache.json"])
        if panel["title"] == "Hit rate by instance"
    )
    color = panel["options"]["color"]
    assert (color["scheme"], color["min"], color["max"]) == ("RdYlGn", 0, 1)
    # Grafana's palettes.ts reverses this scheme by itself (invert: 'always'), and once more here.
    assert color["reverse"] is True
    assert panel["options"]["filterValues"]["le"] < 0  # else 0 % would be hidden, not red
    assert panel["interval"] == "5m"
    (target,) = panel["targets"]
    assert "$__interval" in target["expr"]
    assert target["expr"].count("by (instance)") == 2


def test_a_trace_leads_to_its_logs_and_its_profile() -> None:
    of_kind = {panel["type"]: panel for panel in panels(BOARDS["dsagent-trace.json"])}
    assert of_kind["traces"]["targets"][0]["query"] == "${trace}"
    assert "$trace" in of_kind["logs"]["targets"][0]["expr"]
    assert "$service" in of_kind["flamegraph"]["targets"][0]["labelSelector"]
    (override,) = of_kind["table"]["fieldConfig"]["overrides"]
    (link,) = override["properties"][0]["value"]
    assert "var-trace=${__value.raw}" in link["url"]
    assert "${__dashboard.uid}" in link["url"]  # it has no uid of its own


def test_promtool_parses_every_expression(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here (apt install prometheus)")
    rules = [
        {
            "record": f"tried:{number}",
            "expr": expr.replace("$__rate_interval", "5m")
            .replace("$__range", "1h")
            .replace("$__interval", "5m"),
        }
        for number, expr in enumerate(expressions())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "boards", "rules": rules}]}))
    checked = subprocess.run(
        [promtool, "check", "rules", path], capture_output=True, text=True, check=False, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout
