"""Settings: a flag, a variable DSAGENT_<NAME> and a key in a TOML file are one setting.

Flags win over variables, variables over the file. The file is the one named
by --config or DSAGENT_CONFIG, else /etc/dsagent/dsagent.toml where there is
one. A key that no command knows is an error, so that a typing mistake is not
silently nothing.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.files import read_named
from dsagent.agent.listening import ports

DEFAULT_FILE = Path("/etc/dsagent/dsagent.toml")
ENV_PREFIX = "DSAGENT"
TABLES = ("sidecar",)  # of one command each; all other settings are single values
MAX_SECONDS = 1e9
MAX_BYTES = 1 << 60
PROMETHEUS_DEFAULT = ports.on_loopback(ports.METRICS)
# What these options mean without an address: the usual ports.
ADDRESS_DEFAULTS = {
    "--prometheus": PROMETHEUS_DEFAULT,
    "--otlp-receive": ports.on_loopback(ports.OTLP_HTTP),
    "--otlp-receive-grpc": ports.on_loopback(ports.OTLP_GRPC),
}

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
_ADDRESS = re.compile(
    r"(?:(?P<name>[^\[\]:\s]+)|\[(?P<address>[0-9a-fA-F:.]+(?:%\w+)?)\]):(?P<port>[0-9]{1,5})"
)

# A command's option. Its variable follows from its name: the help says so once, not each time.
option = functools.partial(typer.Option, show_envvar=False)


def take_config_flag(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Takes --config FILE out of the arguments, wherever it stands before a bare `--`."""
    rest: list[str] = []
    config: str | None = None
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--":
            return [*rest, argument, *arguments], config
        if argument == "--config":
            config = next(arguments, None)
            if not config:
                raise DsagentError("--config needs a file", exit_code=USAGE)
        elif argument.startswith("--config="):
            config = argument.removeprefix("--config=")
            if not config:
                raise DsagentError("--config needs a file", exit_code=USAGE)
        else:
            rest.append(argument)
    return rest, config


def complete_addresses(argv: Sequence[str]) -> list[str]:
    """A bare --prometheus means 127.0.0.1:9464: what follows is its address only with a colon,
    so that `--prometheus 1234` does not swallow a pid. Likewise the others."""
    out: list[str] = []
    for index, argument in enumerate(argv):
        out.append(argument)
        if argument in ADDRESS_DEFAULTS:
            following = argv[index + 1] if index + 1 < len(argv) else ""
            if ":" not in following or following.startswith("-"):
                out.append(ADDRESS_DEFAULTS[argument])
    return out


def _options(function: Callable[..., Any]) -> dict[str, OptionInfo]:
    hints = get_type_hints(function, include_extras=True)
    return {
        name: extra
        for name in inspect.signature(function).parameters
        for extra in get_args(hints[name])[1:]
        if isinstance(extra, OptionInfo)
    }


def option_names(function: Callable[..., Any]) -> frozenset[str]:
    """The settings of one command: its options, as its function's parameters name them."""
    return frozenset(_options(function))


@dataclass(frozen=True, slots=True)
class File:
    """The settings file that was `named`, or the default one, and the keys that may stand in it."""

    named: str | None
    known: frozenset[str] = frozenset()

    @property
    def path(self) -> Path | None:
        """None where none was named and the default one is not there."""
        if self.named is not None:
            return Path(self.named)
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None

    def load(self) -> Mapping[str, Any]:
        """As it is now, tables too. Raises DsagentError (exit 2)."""
        return load(self.named, self.known)


def load(named: str | None, known: Iterable[str]) -> Mapping[str, Any]:
    """The file's settings. Raises DsagentError (exit 2): not there, not TOML, an unknown key."""
    import tomllib

    path = Path(named) if named is not None else DEFAULT_FILE
    if named is None and not path.is_file():
        return {}
    text = read_named(path)
    try:
        values = tomllib.loads(text.decode())
    except RecursionError as error:
        raise DsagentError(f"{path} is nested too deeply", exit_code=USAGE) from error
    except ValueError as error:  # not UTF-8, not TOML, a number of 5000 digits
        raise DsagentError(f"{path} is not TOML: {error}", exit_code=USAGE) from error
    names = sorted(known)
    for key, value in values.items():
        if key in TABLES and isinstance(value, dict):
            continue  # checked by who reads it
        if key not in names:
            near = get_close_matches(key, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
            raise DsagentError(f"unknown setting {key!r} in {path}{hint}", exit_code=USAGE)
        if isinstance(value, (dict, list)):
            raise DsagentError(f"{key} in {path} must be one value", exit_code=USAGE)
    return values


def seconds(value: float | None) -> float | None:
    """A callback for options: what is beyond counting (inf, nan) is refused."""
    if value is not None and not value <= MAX_SECONDS:
        raise typer.BadParameter(f"{value} is no number of seconds up to {MAX_SECONDS:.0e}.")
    return value


def size_bytes(value: int) -> int:
    """A callback for options: no disk is larger than 2**60 bytes."""
    if value > MAX_BYTES:
        raise typer.BadParameter(f"{value} is more than {MAX_BYTES}.")
    return value


def named_path(value: object) -> Path:
    """A parser for options: without a name it would be the current folder."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise typer.BadParameter("it needs a name.")
    return Path(value)


def listen_address(text: str | None, usual: str = PROMETHEUS_DEFAULT) -> str | None:
    """HOST:PORT; the usual address for a bare yes, None for a no. Raises DsagentError (exit 2)."""
    if text is None or text.lower() in _NO:
        return None
    if text.lower() in _YES:
        return usual
    parse_address(text)
    return text


def parse_percent(text: str, least: float = math.ulp(0.0)) -> float:
    """'"1"', "1%" and "0.5 %" as a ratio; 0 only where `least` allows it. Raises DsagentError
    (exit 2)."""
    try:
        ratio = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        ratio = -1.0
    if not least <= ratio <= 1:
        raise DsagentError(f"{text!r} is no percentage; say 1% or 0.5%", exit_code=USAGE)
    return ratio


def parse_names(text: str | None, known: Sequence[str]) -> frozenset[str]:
    """Names by commas, each one of `known`. Raises DsagentError (exit 2)."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise DsagentError(f"{name!r} is none of {', '.join(known)}", exit_code=USAGE)
    return frozenset(names)


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or [HOST]:PORT for IPv6. Raises DsagentError (exit 2)."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise DsagentError(f"{text!r} is not HOST:PORT or [IPV6]:PORT", exit_code=USAGE)
    return found["name"] or found["address"], int(found["port"])
