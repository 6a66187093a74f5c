"""Reads the settings: flags before variables before the file, the same way as at the start.

The command's own parser is asked again with the file's new values, so that a value is checked by
one set of rules, whenever it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from dsagent.agent import settings
from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.sidecar.options import SidecarOptions
from dsagent.agent.slo import load_slo

(TABLE,) = settings.TABLES  # of the file: what may be said nowhere else
KEYS = {"allow_inject": bool}

Parse = Callable[[Mapping[str, Any]], SidecarOptions]


@dataclass(frozen=True, slots=True)
class Start:
    """What the command is given: its own arguments, and the file."""

    arguments: tuple[str, ...]
    file: settings.File


@dataclass(slots=True)
class Reading:
    """Handed to the command instead of running it: takes the options that it makes of the
    values."""

    options: SidecarOptions | None = None


def parser_of(context: typer.Context, arguments: Sequence[str]) -> Parse:
    """What the command of `context` makes of these arguments and a file's values. The function
    raises DsagentError (exit 2)."""

    def parse(values: Mapping[str, Any]) -> SidecarOptions:
        reading = Reading()
        try:
            with context.command.make_context(
                context.info_name, list(arguments), obj=reading, default_map=dict(values)
            ) as made:
                context.command.invoke(made)
        except typer.TyperException as error:
            raise DsagentError(error.format_message(), exit_code=USAGE) from error
        assert reading.options is not None
        return reading.options

    return parse


class SettingsReader:
    """`read` may be called again and again."""

    def __init__(self, file: settings.File, parse: Parse) -> None:
        self._file = file
        self._parse = parse

    @property
    def path(self) -> Path | None:
        return self._file.path

    def read(self) -> SidecarOptions:
        """Raises DsagentError: the file, or one that it names, cannot be read or is wrong."""
        values = dict(self._file.load())
        own = values.pop(TABLE, {})
        options = self._parse(values)
        slo = options.attach.outlets.slo
        attach = replace(options.attach, slo=None if slo is None else load_slo(slo))
        return replace(
            options, attach=attach, allow_inject=_own(own, self._file).get("allow_inject", False)
        )


def _own(table: Mapping[str, Any], file: settings.File) -> dict[str, Any]:
    for key, value in table.items():
        if key not in KEYS:
            known = ", ".join(KEYS)
            message = f"unknown setting {key!r} in [{TABLE}] of {file.path}; known are {known}"
            raise DsagentError(message, exit_code=USAGE)
        if not isinstance(value, KEYS[key]):
            message = f"{key} in [{TABLE}] of {file.path} must be true or false"
            raise DsagentError(message, exit_code=USAGE)
    return dict(table)
