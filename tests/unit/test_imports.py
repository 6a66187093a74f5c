"""Imports run one way. Each rule is tried on a tree that breaks it, then on ours."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "instrumentation", "agent", "dashboards")

# What each package may import of ours; lazily or not makes no difference.
ALLOWED = {
    "engine": ("engine",),
    "instrumentation": ("instrumentation",),
    "agent": ("agent", "instrumentation"),
    "dashboards": (
        "dashboards",
        *(
            "agent.metrics.catalog",
            "agent.metrics.metric",
            "agent.screens.remedies",
            "agent.slo",
            "agent.metrics.slo_metrics",
        ),
        "instrumentation.names",
    ),
}
# The exceptions, module by module.
ALSO_ALLOWED = {
    "instrumentation.reference": ("engine",),
    "agent.commands.slo": ("dashboards",),
}

# The base distribution has no dependencies, and these modules are in it.
FOREIGN_IN_INSTRUMENTATION = {
    "instrumentation.sdk": ("opentelemetry",),
    "instrumentation.profiled": ("pyroscope",),
    "instrumentation.vllm": ("vllm",),
}
NEVER_IN_AGENT = ("torch", "vllm", "transformers")
# Large, and not asked for by every command: only inside the function that needs them.
LAZY_IN_AGENT = (
    "duckdb",
    "grpc",
    "opentelemetry.sdk",
    "opentelemetry.exporter",
    "dsagent.instrumentation.sdk",
)
# These, and whatever says of itself that it is pure.
PURE = ("agent.attribution.join", "agent.attribution.model", "agent.attribution.attribute")
SAYS_PURE = re.compile(r"\bPure\b|\(pure\)")
IMPURE = (  # not datetime: who is given a time may write it as text
    *("asyncio", "io", "mmap", "os", "pathlib", "random", "socket", "subprocess"),
    *("tempfile", "threading", "time"),
)


@dataclass(frozen=True, slots=True)
class Import:
    importer: str  # without the leading "dsagent."; scripts and tests by their path
    name: str  # the whole dotted name
    line: int
    lazy: bool  # inside a function, or for the type checker only
    by_pure: bool = False  # the importer's docstring says that it is pure

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name}"


def within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def module_name(root: Path, path: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def names_imported(node: ast.AST, importer: str, is_package: bool) -> Iterator[str]:
    """The dotted names that one node imports; for `from a import b` that is a.b."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = f"dsagent.{importer}".split(".")
            kept = len(above) - node.level + is_package
            base = ".".join([*above[:kept], *([base] if base else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        argument = node.args[0] if node.args else None
        if (
            name in ("import_module", "__import__")
            and isinstance(argument, ast.Constant)
            and isinstance(argument.value, str)
        ):
            yield argument.value


def imports_of(path: Path, importer: str) -> Iterator[Import]:
    is_package = path.name == "__init__.py"
    tree = ast.parse(path.read_bytes(), str(path))
    is_pure = SAYS_PURE.search(ast.get_docstring(tree) or "") is not None

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for name in names_imported(node, importer, is_package):
            yield Import(importer, name, getattr(node, "lineno", 0), lazy, is_pure)
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.stmt) and is_type_checking(node):
            inside = True
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy or inside)

    yield from visit(tree, lazy=False)


def modules(root: Path) -> dict[str, Path]:
    return {
        module_name(root, path): path
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def breaches_of_ours(found: Import) -> Iterator[str]:
    """What is wrong with one import of one of our modules."""
    package = found.importer.split(".", 1)[0]
    name = found.name.removeprefix("dsagent").removeprefix(".")
    allowed = (*ALLOWED[package], *ALSO_ALLOWED.get(found.importer, ()))
    if not within(name, *allowed):
        yield f"{package} may import only {', '.join(allowed)}"
    for one, other in (("agent.sources", "agent.sinks"), ("agent.sinks", "agent.sources")):
        if within(found.importer, one) and within(name, other):
            yield "sources and sinks know nothing of each other"


def breaches_of_others(found: Import) -> Iterator[str]:
    """What is wrong with one import of the standard library's or of a stranger's module."""
    package, top = found.importer.split(".", 1)[0], found.name.split(".", 1)[0]
    foreign = FOREIGN_IN_INSTRUMENTATION.get(found.importer, ())
    if package == "instrumentation" and top not in (*sys.stdlib_module_names, *foreign):
        yield "the base distribution has no dependencies"
    if package == "agent" and within(found.name, *NEVER_IN_AGENT):
        yield "never in the agent"
    if (found.by_pure or found.importer in PURE) and within(found.name, *IMPURE):
        yield "a pure module has no I/O and no clock"


def breaches_of(found: Import) -> Iterator[str]:
    if within(found.name, *PACKAGES):
        yield f"{found}: it is a second copy; write dsagent.{found.name}"
        return
    rules = breaches_of_ours if within(found.name, "dsagent") else breaches_of_others
    yield from (f"{found}: {problem}" for problem in rules(found))
    if within(found.importer, "agent") and not found.lazy and within(found.name, *LAZY_IN_AGENT):
        yield f"{found}: only inside the function that needs it"


def cycles(names: set[str], imports: list[Import]) -> list[str]:
    """Cycles among imports that run when a module is loaded."""
    edges: dict[str, set[str]] = {name: set() for name in names}
    for found in imports:
        if found.lazy or not found.name.startswith("dsagent."):
            continue
        name = found.name.removeprefix("dsagent.")
        while name not in names and "." in name:  # `from module import thing` names the thing too
            name = name.rpartition(".")[0]
        if name in names and name != found.importer:
            edges[found.importer].add(name)

    found_cycles: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found_cycles.append(" → ".join((*path[path.index(name) :], name)))
            return
        if name in done:
            return
        for imported in sorted(edges[name]):
            visit(imported, (*path, name))
        done.add(name)

    for name in sorted(names):
        visit(name, ())
    return found_cycles


def breaches(root: Path) -> list[str]:
    paths = modules(root)
    imports = [found for name, path in paths.items() for found in imports_of(path, name)]
    return [
        *(problem for found in imports for problem in breaches_of(found)),
        *(f"a cycle: {cycle}" for cycle in cycles(set(paths), imports)),
    ]


def bare_imports(root: Path) -> list[str]:
    """Imports of our folders without `dsagent.` in tests and scripts."""
    return [
        str(found)
        for folder in ("tests", "scripts")
        for path in sorted((root / folder).rglob("*.py"))
        for found in imports_of(path, str(path.relative_to(root)))
        if within(found.name, *PACKAGES)
    ]


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GOOD = {
    "engine/__init__.py": "",
    "engine/loop.py": "import torch\nfrom dsagent.engine import observe\nfrom . import observe\n",
    "engine/observe.py": "from dataclasses import dataclass\n",
    "instrumentation/__init__.py": "",
    "instrumentation/names.py": "",
    "instrumentation/ring.py": "import mmap\nimport struct\n",
    "instrumentation/sdk.py": "import opentelemetry.sdk.trace\n",
    "instrumentation/vllm.py": "def go():\n    import vllm.plugins\n",
    "instrumentation/reference.py": "from dsagent.engine.observe import StepObserver\n",
    "agent/__init__.py": "",
    "agent/metrics/catalog.py": "import numpy\n",
    "agent/attribution/join.py": "import numpy\nfrom dsagent.agent.facts import Facts\n",
    "agent/facts.py": "import os\nfrom dsagent.instrumentation.names import X\n",
    "agent/commands/sql.py": "def go():\n    import duckdb\n    import grpc\n",
    "agent/sources/steps.py": "from dsagent.agent.facts import Source\nfrom ..facts import Facts\n",
    "agent/sinks/otlp.py": "import opentelemetry.proto.trace\n",
    "dashboards/board.py": "from dsagent.agent.metrics import catalog\n"
    "from dsagent.instrumentation.names import X\n",
    "tests/test_a.py": "import dsagent.agent.metrics.catalog\n",
}


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("engine/loop.py", "import dsagent.agent.facts", "engine may import only engine"),
        ("engine/loop.py", "def f():\n    from dsagent import agent", "engine may import only"),
        ("engine/loop.py", "from ..instrumentation import ring", "engine may import only"),
        (
            "engine/x.py",
            "import importlib\nimportlib.import_module('dsagent.agent')",
            "only engine",
        ),
        ("engine/x.py", "import engine.loop", "second copy"),
        ("agent/x.py", "import agent", "second copy"),
        ("agent/x.py", "from agent.facts import Facts", "second copy"),
        ("instrumentation/ring.py", "import dsagent.engine.observe", "may import only"),
        ("instrumentation/reference.py", "import dsagent.agent.facts", "may import only"),
        ("instrumentation/ring.py", "import numpy", "no dependencies"),
        ("instrumentation/ring.py", "def f():\n    import opentelemetry", "no dependencies"),
        ("agent/x.py", "from dsagent.engine import loop", "may import only"),
        ("agent/x.py", "def f():\n    import torch.cuda", "never in the agent"),
        ("agent/x.py", "def f():\n    import vllm", "never in the agent"),
        ("agent/x.py", "import duckdb", "only inside the function"),
        (
            "agent/x.py",
            "try:\n    import grpc\nexcept ImportError:\n    grpc = None",
            "only inside",
        ),
        ("agent/x.py", "from opentelemetry.sdk.trace import Tracer", "only inside the function"),
        ("agent/x.py", "class A:\n    import duckdb", "only inside the function"),
        ("dashboards/board.py", "import dsagent.agent.facts", "dashboards may import only"),
        (
            "dashboards/board.py",
            "import dsagent.instrumentation.ring",
            "dashboards may import only",
        ),
        ("agent/sources/x.py", "from dsagent.agent.sinks import base", "nothing of each other"),
        ("agent/sinks/x.py", "from ..sources.steps import S", "nothing of each other"),
        ("agent/attribution/join.py", "import time", "no I/O and no clock"),
        (
            "agent/attribution/model.py",
            "def f():\n    from pathlib import Path",
            "no I/O and no clock",
        ),
        ("agent/x.py", '"""Sums. Pure."""\nimport os', "no I/O and no clock"),
        ("agent/x.py", '"""Sums (pure)."""\ndef f():\n    import time', "no I/O and no clock"),
        (
            "agent/facts.py",
            "from dsagent.agent.attribution.join import j",
            "a cycle: agent.attribution.join → agent.facts",
        ),
    ],
)
def test_each_breach_is_found(tmp_path: Path, file: str, text: str, expected: str) -> None:
    found = breaches(lay(tmp_path, {**GOOD, file: text + "\n"}))
    assert len(found) == 1, found
    assert expected in found[0]


def test_a_good_tree_has_no_breach(tmp_path: Path) -> None:
    assert breaches(lay(tmp_path, GOOD)) == []
    assert bare_imports(tmp_path) == []


def test_a_cycle_that_only_a_call_closes_is_none(tmp_path: Path) -> None:
    files = {
        "agent/a.py": "from dsagent.agent import b\n",
        "agent/b.py": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from dsagent.agent.a import A\n"
        "def f():\n    from dsagent.agent.a import A\n",
    }
    assert breaches(lay(tmp_path, files)) == []


def test_a_bare_import_in_a_test_is_found(tmp_path: Path) -> None:
    lay(tmp_path, {"tests/unit/test_a.py": "def f():\n    from engine.loop import Engine\n"})
    assert bare_imports(tmp_path) == ["tests/unit/test_a.py:2 imports engine.loop.Engine"]


def test_ours_run_one_way() -> None:
    assert {name.split(".")[0] for name in modules(ROOT)} == set(PACKAGES)
    assert breaches(ROOT) == []


def test_ours_are_never_imported_bare() -> None:
    assert bare_imports(ROOT) == []
