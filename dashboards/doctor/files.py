"""Files of boards and rules, read as what a stranger sent: bounded, and never trusted to nest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsagent.dashboards.doctor.findings import InputError, one_line

MOST_BYTES = 16 << 20
MOST_YAML_DEPTH = 64  # the time to parse grows with its square
ENDINGS = (".json", ".yaml", ".yml")


def load(path: Path) -> Any:
    """What a JSON or YAML file holds; InputError is one line."""
    text = _text(path)
    try:
        return json.loads(text) if path.suffix == ".json" else _yaml(text)
    except RecursionError as error:
        raise InputError("it nests too deeply") from error
    except ValueError as error:
        raise InputError(f"it is not {_kind(path)}: {one_line(error)}") from error


def below(paths: list[Path]) -> list[Path]:
    """The files named, and those in the folders named; InputError where there is nothing."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(each for each in path.rglob("*") if each.suffix in ENDINGS)
        elif path.exists():
            found.append(path)
        else:
            raise InputError(f"{path}: there is no such file")
    if not found:
        raise InputError(f"{', '.join(map(str, paths))}: no .json, .yaml or .yml file there")
    return found


def _kind(path: Path) -> str:
    return "JSON" if path.suffix == ".json" else "YAML"


def _text(path: Path) -> str:
    try:
        if not path.is_file():  # a device or a pipe would be read for ever
            raise InputError("there is no such file" if not path.exists() else "it is not a file")
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InputError(f"it is larger than {MOST_BYTES >> 20} MiB")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError("it is not text (UTF-8)") from error


def _yaml(text: str) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, loader):
            # An alias may stand for itself, or for a billion copies: rules need none.
            if isinstance(event, yaml.AliasEvent):
                raise InputError("it has YAML aliases, which rules need not")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_YAML_DEPTH:
                raise InputError("it nests too deeply")
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise InputError(f"it is not YAML: {one_line(error)}") from error
