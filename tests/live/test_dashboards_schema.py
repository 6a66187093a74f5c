"""Grafana's own types, from npm, take every board: compiled by tsc, as Grafana's code is."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsagent.dashboards.generate import generated

GRAFANA = "11.6.0"  # what grafana-foundation-sdk is pinned to
PACKAGES = (f"@grafana/schema@{GRAFANA}", "typescript@5.7.3")
RAW = "./node_modules/@grafana/schema/dist/esm/raw"  # a path: the package exports no such module
PANELS = {
    "bargauge": "BarGauge",
    "heatmap": "Heatmap",
    "stat": "Stat",
    "statetimeline": "StateTimeline",
    "table": "Table",
    "text": "Text",
    "timeseries": "TimeSeries",
}
QUERIES = {"loki": "Loki", "tempo": "Tempo"}
# Grafana's plug-in for state timelines has a dash in its name.
FOLDERS = {"state-timeline": "statetimeline"}

# JSON has an enum's value where TypeScript wants the enum; beyond that nothing is relaxed.
PRELUDE = f"""\
import type {{ Dashboard }} from '{RAW}/dashboard/x/dashboard_types.gen';
type Plain<T> = 0 extends 1 & T ? any : unknown extends T ? T
  : T extends string ? `${{T}}` : T extends number ? number : T extends boolean ? T
  : T extends readonly (infer U)[] ? Plain<U>[]
  : T extends object ? {{ [K in keyof T]: Plain<T[K]> }} : T;
"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Grafana's types and tsc."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm here")
    folder = tmp_path_factory.mktemp("types")
    (folder / "package.json").write_text("{}")
    installed = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    if installed.returncode:
        pytest.skip(f"npm cannot fetch Grafana's types: {installed.stderr.splitlines()[-1:]}")
    return folder


def complaints(folder: Path, boards: dict[str, dict[str, Any]]) -> list[str]:
    """What tsc says of the boards, each in a file of its own."""
    names = []
    for name, board in boards.items():
        names.append(f"{name}.ts")
        (folder / names[-1]).write_text(program(board))
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--lib", "es2022,dom"]
    flags += ["--moduleResolution", "bundler", "--module", "esnext"]
    ended = subprocess.run(
        ["node", "node_modules/typescript/bin/tsc", *flags, *names],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    found = ended.stdout.splitlines()
    assert bool(found) == bool(ended.returncode), ended.stderr
    return found


def program(board: dict[str, Any]) -> str:
    lines = [PRELUDE]
    for kind, name in PANELS.items():
        path = f"{RAW}/composable/{kind}/panelcfg/x/{name}PanelCfg_types.gen"
        lines.append(f"import type * as {kind} from '{path}';")
    for kind, name in QUERIES.items():
        path = f"{RAW}/composable/{kind}/dataquery/x/{name}DataQuery_types.gen"
        lines.append(f"import type * as {kind} from '{path}';")
    lines.append(f"const board: Plain<Dashboard> = {json.dumps(board)};")
    for panel in board["panels"]:
        kind = FOLDERS.get(panel["type"], panel["type"])
        if kind not in PANELS:
            continue
        number = panel["id"]
        options = json.dumps(panel.get("options", {}))
        lines.append(f"const options{number}: Plain<Partial<{kind}.Options>> = {options};")
        custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom")
        if custom is not None:
            lines.append(f"const custom{number}: Plain<{kind}.FieldConfig> = {json.dumps(custom)};")
        for at, target in enumerate(panel.get("targets", ())):
            of = target["datasource"]["type"]
            if of in QUERIES:
                name = f"target{number}_{at}"
                type_name = "TempoQuery" if of == "tempo" else "LokiDataQuery"
                lines.append(f"const {name}: Plain<{of}.{type_name}> = {json.dumps(target)};")
    return "\n".join([*lines, "export {};", ""])


OURS = {name.removesuffix(".json"): json.loads(text) for name, text in generated().items()}


def wrong_ones() -> dict[str, dict[str, Any]]:
    made = {}
    for name, change in (
        ("top", lambda b: b.update(graphTooltip="crosshair")),
        ("grid", lambda b: b["panels"][1]["gridPos"].update(x="0")),
        ("color", lambda b: b["panels"][2]["options"]["color"].update(mode="rainbow")),
        ("unknown", lambda b: b["panels"][2]["options"].update(colour=1)),
    ):
        made[name] = copy.deepcopy(OURS["dsagent-cache"])
        change(made[name])
    return made


@pytest.fixture(scope="module")
def refused(compiler: Path) -> list[str]:
    """One run of tsc for all: it takes most of its time for the types."""
    return complaints(compiler, OURS | wrong_ones())


def test_grafanas_own_types_take_every_board(refused: list[str]) -> None:
    assert [line for line in refused if line.split(".ts(")[0] in OURS] == []


def test_they_refuse_what_is_wrong(refused: list[str]) -> None:
    lines = [line for line in refused if ".ts(" in line]
    assert {line.split(".ts(")[0] for line in lines} >= set(wrong_ones()), refused
    assert {line.split("error ")[1][:6] for line in lines} <= {"TS2322", "TS2353"}, refused
