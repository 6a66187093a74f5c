"""Makes one self-contained source of some of our modules, for a process that cannot import them.

Only what the entry needs is kept, without comments, docstrings and the
annotations of functions. Each module runs in a namespace of its own, so equal
names do not clash, and none is entered into sys.modules.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

PACKAGE = "dsagent.instrumentation"
_TABLE = "BUNDLE"
_INNER = "'''"  # round each module; what is round the whole is another

# `BUNDLE` gets the namespaces, by their modules' short names. For dataclasses, the name of a
# module must be one that is in sys.modules.
_LOADER = f"""
import types
{_TABLE} = {{}}
def load(name, source):
    module = types.ModuleType("builtins")
    module.__dict__["{_TABLE}"] = {_TABLE}
    exec(compile(source, "<dsagent." + name + ">", "exec"), module.__dict__)
    {_TABLE}[name] = module
"""

Source = Callable[[str], str]


class CannotBundle(Exception):  # noqa: N818 - what was found, not what went wrong
    """A module imports what the target may not have."""


@cache
def installed_source(name: str) -> str:
    """The source of one of our own modules, by its short name."""
    spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
    if spec is None or spec.origin is None:
        raise CannotBundle(f"there is no module {name}")
    return Path(spec.origin).read_text(encoding="utf-8")


def bundle(entries: Sequence[tuple[str, str]], source_of: Source = installed_source) -> str:
    """A source that defines BUNDLE, a dict from short names to modules. `entries`, (module, name)
    each, are in it, and whatever they need."""
    modules = _Modules(source_of)
    for module, name in entries:
        modules.need(module, name)
    parts = [_LOADER]
    for name in modules.in_order():
        parts.append(f"load({name!a}, {quoted(modules.kept(name), _INNER)})\n")
    return "".join(parts)


def quoted(source: str, quotes: str) -> str:
    """A literal of it: over several lines as they are, which is the shortest, where that can be."""
    if quotes in source or "\r" in source or source.endswith(("\\", quotes[0])):
        return ascii(source)
    return f"r{quotes}{source}{quotes}"


class _Module:
    """One module, its statements stripped; what each defines, and what it uses of the others."""

    def __init__(self, name: str, source: str) -> None:
        tree = ast.parse(source)
        _Stripper(name).visit(tree)
        self.statements = [each for statement in tree.body for each in _one_by_one(statement)]
        self.kept: set[int] = set()
        self.defines: dict[str, list[int]] = defaultdict(list)
        self.imported: dict[str, tuple[str, str | None]] = {}  # name → module, name there
        for index, statement in enumerate(self.statements):
            for defined in _defined(statement):
                self.defines[defined].append(index)
            self.imported.update(_imported(statement))

    @property
    def effects(self) -> Iterator[int]:
        """Statements that are there for what they do, not for a name."""
        for index, statement in enumerate(self.statements):
            if isinstance(statement, (ast.Expr, ast.If, ast.Try, ast.For, ast.With)):
                yield index


class _Modules:
    def __init__(self, source_of: Source) -> None:
        self._source_of = source_of
        self._modules: dict[str, _Module] = {}
        self._needs: dict[str, set[str]] = defaultdict(set)

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            module = self._modules[name] = _Module(name, self._source_of(name))
            for index in module.effects:
                self._keep(name, index)
        return self._modules[name]

    def need(self, name: str, defined: str) -> None:
        module = self._module(name)
        if defined not in module.defines:
            raise CannotBundle(f"{name} does not define {defined}")
        for index in module.defines[defined]:
            self._keep(name, index)

    def _keep(self, name: str, index: int) -> None:
        module = self._modules[name]
        if index in module.kept:
            return
        module.kept.add(index)
        statement = module.statements[index]
        for imported, (where, what) in _imported(statement).items():
            self._needs[name].add(where)
            if what is not None:
                self.need(where, what)
            else:
                self._module(where)
                self._need_attributes(module, imported, where)
        for used in _used(statement):
            if used in module.defines:
                for each in module.defines[used]:
                    self._keep(name, each)

    def _need_attributes(self, module: _Module, imported: str, where: str) -> None:
        """Of a module that is imported as such: what is taken from it anywhere in this one."""
        for statement in module.statements:
            for node in ast.walk(statement):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == imported
                ):
                    self.need(where, node.attr)

    def in_order(self) -> list[str]:
        """Whoever is needed comes first."""
        order: list[str] = []

        def visit(name: str, above: tuple[str, ...]) -> None:
            if name in above:
                raise CannotBundle(f"a cycle: {' → '.join((*above, name))}")
            if name not in order:
                for needed in sorted(self._needs[name]):
                    visit(needed, (*above, name))
                order.append(name)

        for name in sorted(self._modules):
            visit(name, ())
        return order

    def kept(self, name: str) -> str:
        module = self._modules[name]
        body = [module.statements[index] for index in sorted(module.kept)]
        future = ast.parse("from __future__ import annotations").body
        body = [statement for statement in body if not _is_future(statement)]
        tree = ast.fix_missing_locations(ast.Module([*future, *map(_linked, body)], []))
        return _narrow(ast.unparse(tree))


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test)


class _Stripper(ast.NodeTransformer):
    """Takes out what only readers and type checkers need, and checks what is imported."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._in_class = False

    def visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                kept = [each for each in statements if not _is_for_readers(each)]
                if field == "body" and not kept and not isinstance(node, ast.Module):
                    kept = [ast.Pass()]
                setattr(node, field, kept)
        result: ast.AST = super().visit(node)
        return result

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        arguments = node.args
        for argument in (
            *arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg,
            arguments.kwarg,
        ):  # fmt: skip
            if argument is not None:
                argument.annotation = None
        node.returns = None
        outside, self._in_class = self._in_class, False
        self.generic_visit(node)
        self._in_class = outside
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        outside, self._in_class = self._in_class, True
        self.generic_visit(node)
        self._in_class = outside
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        """Those of classes stay: dataclasses are made of them."""
        self.generic_visit(node)
        if self._in_class:
            return node
        if node.value is None:
            return ast.Pass()
        return ast.Assign([node.target], node.value)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            self._check(alias.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.level:
            raise CannotBundle(f"{self._name} imports relatively")
        self._check(node.module or "")
        return node

    def _check(self, module: str) -> None:
        top = module.split(".", maxsplit=1)[0]
        ours = module == PACKAGE or module.startswith(PACKAGE + ".")
        if not ours and top not in sys.stdlib_module_names:
            raise CannotBundle(f"{self._name} imports {module}")


def _is_for_readers(statement: object) -> bool:
    return (isinstance(statement, ast.stmt) and _is_type_checking(statement)) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _one_by_one(statement: ast.stmt) -> Iterator[ast.stmt]:
    """An import of several names as several imports: not all may be needed."""
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield ast.ImportFrom(statement.module, [alias], statement.level)
    else:
        yield statement


def _defined(statement: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield (alias.asname or alias.name).split(".")[0]
    else:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _used(statement: ast.stmt) -> set[str]:
    """Every name in it, annotations included: those that are left are strings to dataclasses."""
    used: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Global):
            used.update(node.names)
    return used


def _imported(statement: ast.stmt) -> dict[str, tuple[str, str | None]]:
    """What a statement takes from our other modules: name here → module, and name there."""
    found: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(statement):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(PACKAGE):
            continue
        where = (node.module or "").removeprefix(PACKAGE).removeprefix(".")
        for alias in node.names:
            here = alias.asname or alias.name
            found[here] = (where, alias.name) if where else (alias.name, None)
    return found


class _Linker(ast.NodeTransformer):
    """Imports of our own modules become look-ups in BUNDLE."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        links = _imported(node)
        if not links:
            return node
        lines = [
            f"{here} = {_TABLE}[{where!r}]" + (f".{what}" if what else "")
            for here, (where, what) in links.items()
        ]
        return ast.parse("\n".join(lines)).body


def _linked(statement: ast.stmt) -> ast.stmt:
    result = _Linker().visit(statement)
    if isinstance(result, list):  # an import at the top: of one name, see _one_by_one
        (result,) = result
    assert isinstance(result, ast.stmt)
    return result


def _narrow(source: str) -> str:
    """Indented by one blank a level instead of four, without empty lines; the same program."""
    lines = []
    for line in source.splitlines():
        bare = line.lstrip(" ")
        if bare:
            lines.append(" " * ((len(line) - len(bare)) // 4) + bare)
    narrowed = "\n".join(lines) + "\n"
    if ast.dump(ast.parse(narrowed)) != ast.dump(ast.parse(source)):
        return source + "\n"  # a string over several lines
    return narrowed
