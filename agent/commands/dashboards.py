"""`dsagent dashboards`: becomes the boards' own program. The agent knows no board."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsagent.agent.settings import option


def dashboards(
    action: Annotated[
        Literal["generate", "check"],
        typer.Argument(metavar="generate|check", show_default=False, help="What to do."),
    ],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="Boards (.json), rules (.yaml), or folders of them; for generate, the folder to "
            "write to. Without any: those that come with dsagent.",
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        option(
            metavar="URL",
            help="A Prometheus server, a /metrics page, or such a page in a file. Pages may be "
            "given several times.",
        ),
    ] = None,
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write the Grafana boards, or find what is broken in any board.

    Broken is what asks for dead or renamed metrics, or cannot work. Ends with 1 where check finds
    something.

    \b
    Example:
      dsagent dashboards check my-board.json --metrics http://prometheus:9090
    """
    arguments = [action, *(str(path) for path in files or ())]
    for each in metrics or ():
        arguments += ["--metrics", each]
    if json:
        arguments.append("--json")
    os.execv(sys.executable, [sys.executable, "-m", "dsagent.dashboards", *arguments])
