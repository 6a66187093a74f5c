"""What is built holds every module, and the base of it depends on nothing."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("engine", "instrumentation", "agent", "dashboards")


def settings() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        tables = tomllib.load(file)
    setuptools = tables["tool"]["setuptools"]
    assert isinstance(setuptools, dict)
    return setuptools


def found(root: Path, pattern: str) -> set[str]:
    """Paths in our folders, relative to the tree's root."""
    return {
        str(path.relative_to(root)) for folder in FOLDERS for path in (root / folder).rglob(pattern)
    }


def test_every_folder_with_code_is_a_listed_package() -> None:
    folders = {str(Path(path).parent) for path in found(ROOT, "*.py")}
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)
    listed = settings()["packages"]
    assert isinstance(listed, list)
    assert set(listed) == {f"dsagent.{folder.replace('/', '.')}" for folder in folders}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the tree, and the folder with the sdist and the wheel built from it."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tree)], check=True)
    out = tmp_path_factory.mktemp("dist")
    build = (
        "import sys; from setuptools import build_meta as b; out = sys.argv[1]\n"
        "b.build_sdist(out); b.build_wheel(out)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", build, str(out)],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return tree, out


def test_the_wheel_holds_every_module_and_the_licence(built: tuple[Path, Path]) -> None:
    tree, out = built
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (metadata_name,) = [name for name in names if name.endswith("/METADATA")]
        metadata = Parser().parsestr(wheel.read(metadata_name).decode())
        (entry_points,) = [name for name in names if name.endswith("/entry_points.txt")]
        assert "dsagent = dsagent.agent.cli:main" in wheel.read(entry_points).decode()
    for pattern in ("*.py", "*.bpf.c", "generated/*.json"):
        assert {f"dsagent/{name}" for name in found(tree, pattern)} <= names
    assert "dsagent/__init__.py" not in names  # a namespace: another distribution may share it
    assert any(name.endswith("licenses/LICENSE") for name in names)
    required = metadata.get_all("Requires-Dist") or []
    assert required  # the extras
    assert all("extra ==" in requirement for requirement in required)


def test_the_sdist_can_be_built_again(built: tuple[Path, Path]) -> None:
    tree, out = built
    (path,) = out.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert found(tree, "*.py") <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
