"""The plug-in on a volume: the shipped command copies it there, vLLM's interpreter finds it.

The command runs as it stands in the manifest, but for the two folders, which lie elsewhere here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rendering import ROOT, containers, documents, one, pod_spec

FOUND = """
import importlib.metadata as m, json, sys
(entry,) = m.entry_points(group="vllm.general_plugins", name="dsagent")
module = entry.load().__module__
print(json.dumps([entry.name, entry.value, module, sys.modules[module].__file__]))
"""


def vllm_pod() -> dict[str, Any]:
    return pod_spec(one(documents("examples/vllm"), "Deployment"))


def named(name: str) -> dict[str, Any]:
    (container,) = (each for each in containers(vllm_pod()) if each["name"] == name)
    return container


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the image has it: what pip makes of the distribution, without dependencies."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (
        "engine",
        "instrumentation",
        "agent",
        "dashboards",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tree)], check=True)
    image = tmp_path_factory.mktemp("image")
    site = image / "lib" / "python3.11" / "site-packages"
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation",
         "--no-index", "--no-compile", "--target", str(site), str(tree)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return site


def run_copy(image: Path, plugin: Path) -> subprocess.CompletedProcess[str]:
    shell, flag, script = named("dsagent-plugin")["command"]
    assert script.count("/opt/dsagent/") == 1
    script = script.replace("/opt/dsagent/", f"{image}/").replace("/plugin", str(plugin))
    return subprocess.run([shell, flag, script], capture_output=True, text=True, check=False)


def bare_python() -> str:
    """vLLM's own where it is set up; else any that has no packages of ours."""
    of_vllm = ROOT / ".venv-vllm" / "bin" / "python"
    return str(of_vllm) if of_vllm.exists() else os.path.realpath(sys.executable)


def test_vllms_interpreter_finds_the_plug_in_on_the_volume(site: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "volume"
    plugin.mkdir()
    ran = run_copy(site.parents[2], plugin)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert sum(each.stat().st_size for each in plugin.rglob("*")) < 4 << 20, "the volume holds 64Mi"
    found = subprocess.run(
        [bare_python(), "-c", FOUND],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(plugin)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    name, value, module, file = json.loads(found.stdout)
    assert (name, value) == ("dsagent", "dsagent.instrumentation.vllm:register")
    assert module == "dsagent.instrumentation.vllm"
    assert Path(file).is_relative_to(plugin)


def test_without_the_plug_in_vllm_starts_all_the_same(tmp_path: Path) -> None:
    ran = run_copy(tmp_path / "no image", tmp_path)
    assert ran.returncode == 0
    assert "vLLM runs without it" in ran.stderr


def test_the_engines_container_gets_the_folder_and_nothing_else() -> None:
    vllm, copying = named("vllm"), named("dsagent-plugin")
    (mount,) = (each for each in vllm["volumeMounts"] if each["name"] == "dsagent-plugin")
    assert vllm["env"] == [{"name": "PYTHONPATH", "value": mount["mountPath"]}]
    assert mount["readOnly"] is True
    assert copying["volumeMounts"] == [{"name": mount["name"], "mountPath": "/plugin"}]
    assert not {"command", "securityContext"} & set(vllm), "vLLM's image is untouched"
