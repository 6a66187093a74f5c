"""Our modules as one source: self-contained, small, and the same as the modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import pytest

from dsagent.agent.inject import hooks, text
from dsagent.agent.inject.bundle import CannotBundle, bundle

MODULES = {
    "far": "LIMIT = 7\nUNUSED = 8\n",
    "near": '"""A docstring."""\nfrom __future__ import annotations\n'
    "from typing import TYPE_CHECKING\n"
    "from dsagent.instrumentation import far\nfrom dsagent.instrumentation.far import LIMIT as L\n"
    "if TYPE_CHECKING:\n    import numpy\n"
    "_private = 1\ncount = 0\n"
    "def used(a: numpy.ndarray) -> int:\n"
    '    "says"\n    global count\n    count += 1\n    x: int\n    y: int = far.LIMIT + L\n'
    "    return y + a\n"
    "def unused() -> None:\n    return used(1)\n",
    "entry": "from dsagent.instrumentation.near import used\n_private = 2\n"
    "def run(a):\n    return used(a) + _private\n"
    "def lazily():\n    from dsagent.instrumentation.far import LIMIT, UNUSED\n"
    "    return LIMIT + UNUSED\n",
}


def loaded(source: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "builtins"}
    exec(source, space)
    bundled: dict[str, Any] = space["BUNDLE"]
    return bundled


def test_only_what_is_needed_and_it_works() -> None:
    before = set(sys.modules)
    modules = loaded(bundle([("entry", "run")], MODULES.__getitem__))
    assert modules["entry"].run(1) == 7 + 7 + 1 + 2
    assert modules["near"].count == 1
    assert modules["near"].used.__doc__ is None
    assert modules["near"].used.__annotations__ == {}
    for module, name in (("near", "unused"), ("near", "_private"), ("far", "UNUSED")):
        assert not hasattr(modules[module], name)
    assert set(sys.modules) == before


def test_imports_inside_functions() -> None:
    modules = loaded(bundle([("entry", "lazily")], MODULES.__getitem__))
    assert modules["entry"].lazily() == 15


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("import numpy", "imports numpy"),
        ("def f():\n    import vllm.plugins", "imports vllm.plugins"),
        ("from . import far", "imports relatively"),
        ("from dsagent.instrumentation.far import NOTHING", "far does not define NOTHING"),
        ("from dsagent.agent import clock", "imports dsagent.agent"),
    ],
)
def test_what_cannot_be_bundled(statement: str, problem: str) -> None:
    modules = {**MODULES, "bad": f"{statement}\ndef run():\n    return NOTHING\n"}
    with pytest.raises(CannotBundle, match=problem):
        bundle([("bad", "run")], modules.__getitem__)


def test_a_cycle() -> None:
    modules = {
        "a": "from dsagent.instrumentation.b import y\ndef x():\n    return y\n",
        "b": "from dsagent.instrumentation.a import x\ndef y():\n    return x\n",
    }
    with pytest.raises(CannotBundle, match="a cycle"):
        bundle([("a", "x")], modules.__getitem__)


def test_the_hooks_fit_and_import_nothing_but_the_standard_library() -> None:
    source = hooks.source_to_put(("FRONTEND", "SCHEDULER"))
    made = text.text_of(source, (1 << 47) - 1, 4096)
    assert len(made) <= 64 << 10
    # In a Python that sees nothing but its standard library, and no vLLM: nothing to hook.
    program = (
        "import sys\nbefore = set(sys.modules)\nspace = {'__name__': 'builtins'}\n"
        f"exec({source!r}, space)\nprint(space['REPORT'])\n"
        "print([name for name in set(sys.modules) - before if 'dsagent' in name], sys.meta_path)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], check=True, capture_output=True, text=True
    )
    told, left = ran.stdout.splitlines()
    assert told == hooks.NOTHING_HERE
    assert left.startswith("[] ")
    assert "Patches" not in left


def test_taking_out_what_is_not_there() -> None:
    space: dict[str, Any] = {}
    exec(hooks.source_to_take(), space)
    assert space["REPORT"] == hooks.NOT_INJECTED


def test_the_text_is_one_expression() -> None:
    made = text.text_of("x = 1\ny = '\\'\\n\u20ac'", 4096, 512)
    assert made.endswith(b"\0")
    tree = ast.parse(made[:-1])
    assert [type(statement) for statement in tree.body] == [ast.Expr]


def test_reports() -> None:
    message = "r\u00fcckw\u00e4rts\x1b[2J".encode()
    head = b"".join(value.to_bytes(8, "little") for value in (5, 9, 1, len(message)))
    room = bytes(100)
    report = text.report_of(head + message + room)
    assert report == text.Report(True, "r\u00fcckw\u00e4rts\\x1b[2J", 5, 9)
    assert text.report_of(room) is None
    for numbers in ((5, 9, 2, 0), (5, 9, 1, 1 << 40), (9, 5, 1, 0)):
        head = b"".join(value.to_bytes(8, "little") for value in numbers)
        assert text.report_of(head + room) is None
