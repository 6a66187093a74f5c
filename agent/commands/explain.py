"""`dsagent explain`: where the time of one request went."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsagent.agent.errors import DsagentError
from dsagent.agent.settings import named_path, option

if TYPE_CHECKING:
    from dsagent.agent.session.ledger import By

# An account is complete at most a second after its request's end: one asked for at once is
# waited for rather than denied.
PATIENCE_S = 2.0


def explain(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE_ID|REQUEST_ID",
            help="A trace id, a request id, an X-Request-Id or the beginning of one; "
            "without it, the slowest request.",
        ),
    ] = None,
    recording: Annotated[
        Path | None,
        option(metavar="DIR", parser=named_path, help="Look there, not into the running agent."),
    ] = None,
    last: Annotated[
        str | None,
        option(metavar="SPAN", help="Only what ended in this span: 10m, 90s, 1h."),
    ] = None,
    by: Annotated[
        Literal["ttft", "tpot", "e2e"],
        option(metavar="ttft|tpot|e2e", help="What the slowest is slowest in."),
    ] = "e2e",
    pid: Annotated[
        int | None,
        option(metavar="PID", min=1, help="The server whose agent is asked, if several."),
    ] = None,
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Account for one request: where each millisecond went.

    And who is to blame. Asks the running agent, or looks into a recording.

    \b
    Examples:
      dsagent explain
      dsagent explain 4bf92f3577b34da6a3ce929d0e0e4736
      dsagent explain --by ttft --recording run1
    """
    from dsagent.agent.screens import terminal

    if recording is None:
        document = _ask(request, last, by, pid)
    else:
        document = _look_up(recording, request, last, by)
    if json:
        terminal.put_json(document)
    else:
        from dsagent.agent.screens import render

        terminal.put_text(render.explain(document))


def _ask(request: str | None, last: str | None, by: By, pid: int | None) -> dict[str, Any]:
    from dsagent.agent.listening import control
    from dsagent.agent.session.ledger import KEEP_NS, parse_duration_ns

    question = {
        "op": "explain",
        "id": request,
        "last_ns": KEEP_NS if last is None else parse_duration_ns(last),
        "by": by,
        "pid": pid,
    }
    agent = control.choose(pid)
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            document: dict[str, Any] = control.ask(agent, question)
        except control.Unreachable:
            raise
        except DsagentError as error:
            if request is None or error.exit_code != 2 or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
        else:
            return document


def _look_up(recording: Path, request: str | None, last: str | None, by: By) -> dict[str, Any]:
    from dsagent.agent.session.ledger import of_recording, parse_duration_ns
    from dsagent.agent.sinks.reader import read_accounts

    last_ns = None if last is None else parse_duration_ns(last)
    ledger, now_ns, window_ns = of_recording(read_accounts(recording), last_ns)
    return ledger.explain(request, now_ns=now_ns, last_ns=window_ns, by=by)
