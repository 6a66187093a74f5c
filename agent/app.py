"""One command line: finds the command, loads only it, and turns errors into one line."""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from dsagent.agent import settings, streams
from dsagent.agent.errors import FINDINGS, USAGE, DsagentError
from dsagent.agent.host.procfs import escape

# Of the device behind stdout, met by typer where it prints a help text.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

COMMANDS = (
    *("serve", "attach", "detach", "explain", "why", "doctor", "probes", "demo"),
    *("sidecar", "status", "slo", "dashboards"),
    *("roll", "retain", "fleet"),
)

_THEIR_WORDS = (
    ("Value error, ", ""),
    ("Input should be a valid integer, unable to parse string as an integer", "not a whole number"),
    ("Input should be a valid number, unable to parse string as a number", "not a number"),
    ("Input should be ", "it must be "),
)

ONE_NAME = re.compile(r"^\{([^|]+)\}")  # braces around a choice say that it is one

READS_ITSELF = "sidecar"  # a settings file that is wrong must not end it

EPILOG = (
    "Every option is also a variable (DSAGENT_MAX_OVERHEAD for --max-overhead) and a key of a "
    "TOML file (max_overhead), which --config FILE or DSAGENT_CONFIG names; without either, "
    "/etc/dsagent/dsagent.toml is read where there is one."
)


class Command(TyperCommand):
    """Its usage names what must be given as people write it: PID, where typer says {PID}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [ONE_NAME.sub(r"\1", piece) for piece in super().collect_usage_pieces(ctx)]


def _function(command: str) -> Callable[..., Any]:
    module = importlib.import_module(f"dsagent.agent.commands.{command}")
    function: Callable[..., Any] = getattr(module, command)
    return function


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        streams.put(f"dsagent {version('dsagent')}\n")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """For any LLM request: where each millisecond went, and who is to blame."""


def build(argv: Sequence[str]) -> tuple[typer.Typer, list[str], settings.File | None]:
    """The app with the one command that the arguments name (all of them where they name none),
    the arguments left for it, and the settings file where the command reads that itself."""
    arguments, config = settings.take_config_flag(argv)
    config = config or os.environ.get("DSAGENT_CONFIG") or None
    named = next((each for each in arguments if not each.startswith("-")), None)
    values = {}
    if named != READS_ITSELF and (config is not None or settings.DEFAULT_FILE.is_file()):
        values = dict(_file(config).load())
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        epilog=EPILOG,
    )
    app.callback()(_root)
    for command in (named,) if named in COMMANDS else COMMANDS:
        assert command is not None
        function = _function(command)
        names = settings.option_names(function)
        app.command(
            command,
            cls=Command,
            context_settings={
                "auto_envvar_prefix": settings.ENV_PREFIX,
                "default_map": {k: v for k, v in values.items() if k in names},
            },
        )(function)
    arguments = settings.complete_addresses(arguments)
    return app, arguments, _file(config) if named == READS_ITSELF else None


def _file(config: str | None) -> settings.File:
    names = [settings.option_names(_function(name)) for name in COMMANDS]
    return settings.File(config, frozenset().union(*names))


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; what went wrong is one line on stderr."""
    try:
        app, arguments, file = build(argv)
        start = None
        if file is not None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is read later is new enough
            from dsagent.agent.sidecar.reader import Start

            own = arguments[arguments.index(READS_ITSELF) + 1 :]
            start = Start(tuple(own), file)
        result = app(arguments or ["--help"], standalone_mode=False, prog_name="dsagent", obj=start)
    except Exception as error:  # noqa: BLE001 - the outermost frame: a person gets a line
        return _complain(*_message(error))
    return result if isinstance(result, int) else 0


def _message(error: Exception) -> tuple[str, int]:
    """What to say of an error, and the exit code."""
    match error:
        case DsagentError():
            return str(error), error.exit_code
        case typer.BadParameter() if not error.format_message().startswith("Missing"):
            return _plainly(error.format_message()) + _origin(error), USAGE
        case typer.TyperException():
            return error.format_message().removesuffix(".") + _help_of(error), USAGE
        case ModuleNotFoundError() if not (error.name or "dsagent").startswith("dsagent"):
            return f"this needs the package {error.name}: pip install 'dsagent[agent]'", FINDINGS
        case OSError() if error.errno in _UNWRITABLE and error.filename is None:
            streams.give_up(sys.stdout)
            return f"cannot write the result: {error.strerror}", FINDINGS
    if os.environ.get("DSAGENT_DEBUG") == "1":
        traceback.print_exception(error)
    text = f"internal error: {type(error).__name__}: {error} (DSAGENT_DEBUG=1 shows where)"
    return text, FINDINGS


def _plainly(text: str) -> str:
    """What the library that reads values says of them, less its own words."""
    for theirs, ours in _THEIR_WORDS:
        text = text.replace(theirs, ours)
    return text


def _help_of(error: typer.TyperException) -> str:
    """Where the right usage stands."""
    context = getattr(error, "ctx", None)
    return "" if context is None else f"; see {context.command_path} --help"


def _origin(error: typer.BadParameter) -> str:
    """Where a wrong value is to be mended, if it was not on the command line."""
    name = None if error.param is None else error.param.name
    source = error.ctx.get_parameter_source(name) if error.ctx is not None and name else None
    match source.name if source is not None else "":
        case "ENVIRONMENT":
            return f" ({settings.ENV_PREFIX}_{str(name).upper()} says so)"
        case "DEFAULT_MAP":
            return " (the settings file says so)"
    return ""


def _complain(message: str, exit_code: int) -> int:
    streams.tell(f"dsagent: {escape(' '.join(message.split()), limit=2000)}\n")
    return exit_code
