"""The Prometheus Operator's own schemas, from npm, take our PodMonitor and PrometheusRule."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rendering import every_document

PACKAGE = "@kubernetes-models/prometheus-operator"
VERSION = "6.0.0"
OPERATOR = "monitoring.coreos.com/v1"
KINDS = {"PodMonitor", "PrometheusRule"}

# One line for each document: its number, and what the schema says against it.
PROGRAM = f"""
import * as of from '{PACKAGE}/{OPERATOR}';
import {{ readFileSync }} from 'node:fs';
const documents = JSON.parse(readFileSync(0));
documents.forEach((document, number) => {{
  let said = '';
  try {{ new of[document.kind](document).validate(); }} catch (error) {{ said = error.message; }}
  console.log(JSON.stringify([number, said]));
}});
"""


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which node finds the package."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm here")
    folder = tmp_path_factory.mktemp("schemas")
    (folder / "package.json").write_text("{}")
    installed = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", f"{PACKAGE}@{VERSION}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    if installed.returncode:
        pytest.skip(f"npm cannot fetch the schemas: {installed.stderr.splitlines()[-1:]}")
    return folder


def complaints(folder: Path, documents: list[dict[str, Any]]) -> list[str]:
    ran = subprocess.run(
        ["node", "--input-type=module", "-e", PROGRAM],
        input=json.dumps(documents),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [number for number, _ in said] == list(range(len(documents)))
    return [text for _, text in said]


def ours() -> list[dict[str, Any]]:
    return [document for _, document in every_document() if document["apiVersion"] == OPERATOR]


def test_the_operators_schemas_take_what_is_shipped(schemas: Path) -> None:
    documents = ours()
    assert {document["kind"] for document in documents} == KINDS
    assert complaints(schemas, documents) == [""] * len(documents)


def test_they_refuse_what_is_wrong(schemas: Path) -> None:
    """Else the test above says nothing."""
    wrong = []
    for kind, change in (
        ("PodMonitor", lambda d: d["spec"]["podMetricsEndpoints"][0].update(interval="often")),
        ("PodMonitor", lambda d: d["spec"].pop("selector")),
        ("PrometheusRule", lambda d: d["spec"]["groups"][0]["rules"][0].pop("expr")),
    ):
        document = copy.deepcopy(next(each for each in ours() if each["kind"] == kind))
        change(document)
        wrong.append(document)
    assert all(complaints(schemas, wrong))
