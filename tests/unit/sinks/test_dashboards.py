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

from dsagent.agent.catalog import CATALOGUE
from dsagent.dashboards.generate import GENERATED, generated

BOARDS = {name: json.loads(text) for name, text in generated().items()}
# Words of PromQL that are no metrics, where no bracket follows them.
WORDS = {"by", "without", "ignoring", "on", "group_left", "group_right", "bool", "and", "or"}
SERIES = {name for metric in CATALOGUE for name in series_names(metric)}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions() -> list[str]:
    return [
        target["expr"]
        for board in BOARDS.values()
        for panel in panels(board)
        for target in panel["targets"]
    ]


def metrics_in(expr: str) -> set[str]:
    """The names in an expression that are neither functions, labels nor PromQL's own words."""
    text = re.sub(r'"[^"]*"', "", expr)
    text = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", text)
    text = re.sub(r"\b(by|without|ignoring|on|group_left|group_right)\s*\([^)]*\)", "", text)
    found = re.findall(r"(?<![\w$.])([a-zA-Z_:][\w:]*)\b(?!\s*\()", text)
    return set(found) - WORDS


def test_what_is_committed_is_what_is_generated() -> None:
    committed = {path.name: path.read_text() for path in GENERATED.iterdir()}
    assert committed == generated(), "run python -m dsagent.dashboards.generate"


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
                name = re.fullmatch(r"label_values\((\w+), \w+\)", variable["query"])
                assert name is not None
                assert name[1] in SERIES


def test_labels_are_those_of_the_metrics() -> None:
    labels = {
        name: {a.replace(".", "_") for a in metric.attributes} | {"instance", "le"}
        for metric in CATALOGUE
        for name in series_names(metric)
    }
    for expr in expressions():
        for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expr):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert used <= labels[name], expr


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_complete(name: str) -> None:
    board = BOARDS[name]
    assert "uid" not in board
    assert board["schemaVersion"] >= 36
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels(board):
        title = panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", title
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        letters = [target["refId"] for target in panel["targets"]]
        assert all(letters), title
        assert len(letters) == len(set(letters)), title
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}", title
            if "_bucket" in target["expr"] and panel["type"] == "heatmap":
                assert target["format"] == "heatmap", title
                assert target["exemplar"], title
        if panel["type"] == "heatmap":
            assert panel["options"]["yAxis"]["unit"] == "s", title


def test_promtool_parses_every_expression(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here (apt install prometheus)")
    rules = [
        {
            "record": f"tried:{number}",
            "expr": expr.replace("$__rate_interval", "5m").replace("$__range", "1h"),
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
