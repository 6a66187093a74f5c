"""`dsagent slo`: an SLO file checked, and the rules that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsagent.agent.settings import named_path, option


def slo(
    action: Annotated[
        Literal["check", "generate"], typer.Argument(metavar="check|generate", help="What to do.")
    ],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The SLO file; without it the bundled example."),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            metavar="DIR", parser=named_path, help="Where generate writes (.), and check looks."
        ),
    ] = None,
    divide_windows_by: Annotated[
        float | None,
        option(
            metavar="N",
            min=1,
            max=3600,
            help="Shorter windows, for a demonstration: 60 makes 1 m of 1 h.",
        ),
    ] = None,
    json: Annotated[bool, option("--json", help="Print {errors, files} as JSON.")] = False,
) -> int:
    """Check an SLO file, or write the rules that follow from it.

    check: the file itself, then its rules for Prometheus with their unit tests (by promtool where
    there is one); with --out also whether the files there are up to date. Ends with 1 for findings.

    generate: rules and their tests, and rules for Grafana.

    \b
    Examples:
      dsagent slo check slo.yaml
      dsagent slo generate slo.yaml --out rules
    """
    from dataclasses import replace

    from dsagent.agent import streams
    from dsagent.agent.errors import FINDINGS, DsagentError
    from dsagent.agent.files import Unreadable
    from dsagent.agent.host.procfs import escape
    from dsagent.agent.screens import terminal
    from dsagent.agent.slo.file import load_slo
    from dsagent.dashboards import rules
    from dsagent.dashboards.rules_promtool import promtool_errors

    errors: list[str] = []
    texts: dict[str, str] = {}
    paths: list[Path] = []
    try:
        slo_file = load_slo(file or rules.EXAMPLE)
    except DsagentError as error:
        if action == "generate" or isinstance(error, Unreadable):
            raise
        errors.append(str(error))
    else:
        if divide_windows_by is not None:
            slo_file = replace(slo_file, windows_divided_by=divide_windows_by)
        texts = rules.files(slo_file)
    note = ""
    if action == "generate":
        paths = _write(texts, out or Path())
    elif texts:
        if out is not None:
            errors += rules.differences(texts, out)
            paths = [out / name for name in texts]
        found = promtool_errors(texts)
        errors += found or []
        note = "" if found is not None else " (no promtool here: the rules were not tried)"
    if json:
        terminal.put_json({"errors": errors, "files": [str(path) for path in paths or texts]})
    elif errors:
        streams.put("".join(f"{escape(error, limit=2000)}\n" for error in errors))
    elif action == "generate":
        streams.put("".join(f"{escape(str(path))}\n" for path in paths))
    else:
        streams.put(f"{escape(str(file or rules.EXAMPLE))}: good{note}\n")
    return FINDINGS if errors else 0


def _write(texts: Mapping[str, str], folder: Path) -> list[Path]:
    from dsagent.agent.errors import USAGE, DsagentError
    from dsagent.dashboards import rules

    try:
        return rules.write(texts, folder)
    except (FileExistsError, NotADirectoryError) as error:
        raise DsagentError(f"--out {folder}: not a folder", exit_code=USAGE) from error
    except OSError as error:
        raise DsagentError(f"cannot write {error.filename}: {error.strerror}") from error
