"""`dsagent slo`: what it says of good files and bad ones, through the real command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[str, str], None]

COMMAND = str(Path(sys.executable).with_name("dsagent"))
FILE = "slo: [{model: '*', ttft_ms: 250, objective: 90}]\n"
MADE = [
    "grafana/dsagent-slo.yaml",
    "kubernetes/dsagent-slo.yaml",
    "kubernetes/kustomization.yaml",
    "rules/dsagent-slo-tests.yaml",
    "rules/dsagent-slo.yaml",
]


def slo(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "slo", *argv], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def test_good(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(FILE)
    ran = slo("check", "slo.yaml", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("slo.yaml: good")


BAD = {
    "unknown-key": "slo: [{model: '*', ttfs_ms: 250}]",
    "unknown-key-at-top": "slos: []",
    "objective-as-a-ratio": "slo: [{model: '*', ttft_ms: 250, objective: 0.99}]",
    "unknown-preset": "slo: [{model: '*', preset: gpt-2}]",
    "no-such-class": "prompt_classes: [512]\nslo: [{model: '*', ttft_ms: 1, prompt_class: long}]",
    "twins": "slo: [{model: a, ttft_ms: 1}, {model: a, ttft_ms: 2}]",
    "web-hook": "slo: [{model: a, ttft_ms: 1}]\nwebhook: localhost:9093",
    "cache-without-time": "slo: [{model: a, ttft_ms: 1}]\ncache: [{below: 60}]",
    "not-yaml": "slo: [",
}


def test_bad_is_one_line_each(tmp_path: Path, golden: Golden) -> None:
    said = []
    for name, text in BAD.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        ran = slo("check", f"{name}.yaml", cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (1, ""), name
        assert ran.stdout.count("\n") == 1
        said.append(ran.stdout)
    golden("slo-bad.txt", "".join(said))


def test_generated_then_changed(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(FILE)
    ran = slo("generate", "slo.yaml", "--out", "made", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["errors"] == []
    assert sorted(document["files"]) == [f"made/{name}" for name in MADE]
    made = tmp_path / "made"
    assert sorted(str(p.relative_to(made)) for p in made.glob("*/*")) == MADE
    (made / MADE[0]).write_text("changed by hand")
    checked = slo("check", "slo.yaml", "--out", "made", "--json", cwd=tmp_path)
    assert checked.returncode == 1
    assert json.loads(checked.stdout)["errors"] == [
        f"made/{MADE[0]}: is not what the SLO file makes; run dsagent slo generate"
    ]


def test_shorter_windows(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(FILE)
    ran = slo("generate", "slo.yaml", "--divide-windows-by", "60", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "window: 1m\n" in (tmp_path / MADE[-1]).read_text()


@pytest.mark.parametrize(
    ("argv", "code"), [(["check", "none.yaml"], 2), (["generate", "none.yaml"], 2), (["x"], 2)]
)
def test_no_file_no_action(argv: list[str], code: int, tmp_path: Path) -> None:
    ran = slo(*argv, cwd=tmp_path)
    assert ran.returncode == code
    assert (ran.stdout + ran.stderr).count("\n") == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(FILE)
    ran = slo("generate", "slo.yaml", "--out", "/proc/rules", cwd=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.startswith("dsagent: cannot write ")
