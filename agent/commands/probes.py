"""`dsagent probes`: what is read from the kernel here, and what it costs."""

from __future__ import annotations

from typing import Annotated

import typer

from dsagent.agent.errors import FINDINGS
from dsagent.agent.settings import option


def probes(
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the kernel probes, and whether each works here.

    And what each measures, and what a run of it costs. Attaches each for a moment, to a child of
    its own; needs no target and no running agent. Ends with 1 where a probe failed or none works.

    \b
    Example:
      dsagent probes
    """
    from dsagent.agent.checks.trial import try_probes
    from dsagent.agent.checks.trial_outside import try_outside
    from dsagent.agent.screens import terminal

    document = {"probes": [tried.to_json() for tried in (*try_probes(), *try_outside())]}
    if json:
        terminal.put_json(document)
    else:
        from dsagent.agent.screens import render_checks

        terminal.put_text(render_checks.probes(document))
    states = [probe["state"] for probe in document["probes"]]
    if "failed" in states or "ok" not in states:
        raise typer.Exit(FINDINGS)
