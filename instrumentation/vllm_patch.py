"""Attributes of another package's classes, replaced until removed; its modules, seen as they load.

Nothing is imported on the other's behalf: what it has loaded is changed at
once, the rest when it loads it itself.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

_patch_log = logging.getLogger("dsagent")

AnyFunction = Callable[..., Any]


class Hook(NamedTuple):
    """What is to be replaced, and by what: `wrap` gets the original and returns its stand-in."""

    module: str
    owner: str  # a class in the module
    name: str  # a method defined in that very class
    wrap: Callable[[AnyFunction], AnyFunction]


class Patches:
    """The hooks in force. `remove` puts the original objects back."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = tuple(hooks)
        self._wanted = {hook.module for hook in self._hooks}
        self._looking: set[str] = set()
        self._done: list[tuple[type, str, AnyFunction, AnyFunction]] = []
        self.installed: list[str] = []
        self.missing: list[str] = []  # the module is there, the method is not, or will not be

    def install(self) -> None:
        sys.meta_path.insert(0, self)
        for name in self._wanted:
            module = sys.modules.get(name)
            # One that is just being imported has no attributes yet: seen when it is done.
            spec = getattr(module, "__spec__", None)
            if module is not None and not getattr(spec, "_initializing", False):
                self._patch(module)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._wanted.clear()
        for owner, name, original, stand_in in reversed(self._done):
            # Whoever wrapped ours since then keeps his, and ours stays inside it.
            if owner.__dict__.get(name) is stand_in:
                setattr(owner, name, original)
        self._done.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As a finder of sys.meta_path: the others' spec, with a look at the module once loaded."""
        if fullname not in self._wanted or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                load(module)
                if fullname in self._wanted:  # not taken out meanwhile
                    self._patch(module)

            try:
                loader.exec_module = exec_module
            except AttributeError:
                _patch_log.warning("%s is loaded by %r: not hooked", fullname, loader)
        return spec

    def _patch(self, module: ModuleType) -> None:
        """Runs within another's import, which must not fail by our doing."""
        for hook in self._hooks:
            if hook.module != module.__name__:
                continue
            label = f"{hook.module}.{hook.owner}.{hook.name}"
            try:
                done = label not in self.installed and self._replace(module, hook)
            except Exception:  # noqa: BLE001  vLLM goes on without this hook
                _patch_log.exception("%s: not hooked", label)
                done = False
            (self.installed if done else self.missing).append(label)

    def _replace(self, module: ModuleType, hook: Hook) -> bool:
        owner = getattr(module, hook.owner, None)
        original = None if owner is None else owner.__dict__.get(hook.name)
        if owner is None or not callable(original):
            return False
        stand_in = functools.wraps(original)(hook.wrap(original))
        setattr(owner, hook.name, stand_in)
        self._done.append((owner, hook.name, original, stand_in))
        return True
