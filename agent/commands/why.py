"""`dsagent why`: where the time of all requests went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dsagent.agent.settings import named_path, option


def why(
    last: Annotated[
        str, option(metavar="SPAN", help="What ended in this span: 10m, 90s, 1h.")
    ] = "10m",
    recording: Annotated[
        Path | None,
        option(metavar="DIR", parser=named_path, help="Look there, not into the running agent."),
    ] = None,
    pid: Annotated[
        int | None,
        option(metavar="PID", min=1, help="The server whose agent is asked, if several."),
    ] = None,
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say where the time of all recent requests went.

    And who is to blame. Asks the running agent, or looks into a recording.

    \b
    Examples:
      dsagent why
      dsagent why --last 90s --json
    """
    from dsagent.agent.listening import control
    from dsagent.agent.screens import terminal
    from dsagent.agent.session.ledger import of_recording, parse_duration_ns

    last_ns = parse_duration_ns(last)
    if recording is None:
        document = control.ask(control.choose(pid), {"op": "why", "last_ns": last_ns, "pid": pid})
    else:
        from dsagent.agent.sinks.reader import read_accounts

        ledger, now_ns, window_ns = of_recording(read_accounts(recording), last_ns)
        document = ledger.why(now_ns=now_ns, last_ns=window_ns)
    if json:
        terminal.put_json(document)
    else:
        from dsagent.agent.screens import render

        terminal.put_text(render.why(document, last))
