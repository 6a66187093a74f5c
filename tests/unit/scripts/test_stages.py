"""The runner of all tests: what is tried a second time, and that it is told."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "test.py"
FLAKY = """
import pytest

@pytest.fixture(scope="module")
def times():
    with open({seen!r}, "a+") as file:
        file.write("x")
        file.seek(0)
        return len(file.read())

def test_of_chance(times):
    assert times == 2

def test_of_no_chance():
    pass
"""
BROKEN = """
def test_broken_{number}():
    raise AssertionError
"""


@pytest.fixture(scope="module")
def stages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stages_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stages_script"] = module
    spec.loader.exec_module(module)
    return module


def command(folder: Path, broken: int) -> tuple[str, ...]:
    code = FLAKY.format(seen=str(folder / "seen"))
    code += "".join(BROKEN.format(number=number) for number in range(broken))
    folder.joinpath("test_flaky.py").write_text(code)
    return (sys.executable, "-m", "pytest", "-c", "/dev/null", f"--rootdir={folder}", str(folder))


@pytest.mark.parametrize(
    ("broken", "is_live", "exit_code", "tries", "summary"),
    [
        (0, True, 0, 2, "2 passed, 1 of them on a second try"),
        (1, True, 1, 2, "2 passed, 1 failed, 1 of them on a second try"),
        (3, True, 1, 1, "4 failed, 1 passed"),
        (0, False, 1, 1, "1 failed, 1 passed"),
    ],
)
def test_a_few_that_failed_are_tried_again_where_the_machine_can_be_why(
    stages: ModuleType,
    tmp_path: Path,
    broken: int,
    is_live: bool,
    exit_code: int,
    tries: int,
    summary: str,
) -> None:
    stage = stages.Stage("flaky", command(tmp_path, broken), 60, is_live=is_live)
    outcome = stages.run(stage)
    assert outcome.exit_code == exit_code
    assert len((tmp_path / "seen").read_text()) == tries
    assert outcome.summary() == summary
    assert [name.rpartition("::")[2] for name in outcome.on_second_try] == (
        ["test_of_chance"] if tries == 2 else []
    )


def test_a_second_try_that_breaks_off_says_of_no_test_that_it_passed(
    stages: ModuleType, tmp_path: Path
) -> None:
    words = command(tmp_path, 0)
    code = (tmp_path / "test_flaky.py").read_text()
    ends = "    assert times == 1 or __import__('os')._exit(3)\n    raise AssertionError"
    (tmp_path / "test_flaky.py").write_text(code.replace("    assert times == 2", ends))
    outcome = stages.run(stages.Stage("flaky", words, 60, is_live=True))
    assert (outcome.exit_code, outcome.on_second_try) == (3, [])
    assert len((tmp_path / "seen").read_text()) == 2
