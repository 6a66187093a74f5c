"""`dsagent status`: what the running agent watches, and how that goes."""

from __future__ import annotations

from typing import Annotated

from dsagent.agent.settings import option


def status(
    pid: Annotated[
        int | None,
        option(metavar="PID", min=1, help="Only the engine that this process belongs to."),
    ] = None,
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what the running sidecar watches, and how it fares.

    Each engine with its sources and sinks, what was lost, what it costs, and
    what is in the way of watching more. Asks the sidecar, or the agent that
    `dsagent attach` runs.

    \b
    Examples:
      dsagent status
      dsagent status --pid 4242 --json
    """
    from dsagent.agent.listening import control
    from dsagent.agent.screens import terminal

    name = control.choose(pid, or_else=" or `dsagent sidecar`")
    document = control.ask(name, {"op": "status", "pid": pid})
    if json:
        terminal.put_json(document)
    else:
        from dsagent.agent.screens import render_status

        terminal.put_text(render_status.status(document))
