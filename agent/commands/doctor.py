"""`dsagent doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from dsagent.agent.errors import FINDINGS
from dsagent.agent.settings import option


def doctor(
    pid: Annotated[
        int | None,
        option(metavar="PID", min=1, help="Also whether this process can be attached to."),
    ] = None,
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check what works here, and say what to do about the rest.

    Looks at the kernel, BTF, lockdown and capabilities; ends with 1 where something fails.

    \b
    Example:
      dsagent doctor --pid 4242
    """
    from dsagent.agent.checks.doctor import run_checks
    from dsagent.agent.screens import terminal

    document = {"checks": [check.to_json() for check in run_checks(pid)]}
    if json:
        terminal.put_json(document)
    else:
        from dsagent.agent.screens import render_checks

        terminal.put_text(render_checks.checks(document))
    if any(check["state"] == "fail" for check in document["checks"]):
        raise typer.Exit(FINDINGS)
