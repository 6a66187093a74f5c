"""`dsagent demo`: a real engine, a real load, and the account of its slowest request."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.settings import option, seconds

if TYPE_CHECKING:
    from dsagent.agent.host.children import Child
    from dsagent.agent.session.loop import Session

READY_S = 120.0
# A show of everything, not a production server: nothing is stepped down for being dear.
MAX_OVERHEAD_RATIO = 0.05


def demo(
    duration: Annotated[
        float,
        option(metavar="SECONDS", min=1, max=3600, callback=seconds, help="Time under load."),
    ] = 20.0,
    model: Annotated[str, option(metavar="NAME|DIR", help="The model to serve.")] = "smollm2",
    seed: Annotated[int, option(metavar="N", help="Draws the load.")] = 0,
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Serve a real model under load and explain its slowest request.

    Needs nothing running and leaves nothing behind.

    \b
    Example:
      dsagent demo --duration 20
    """
    from dsagent.agent.host.children import Child
    from dsagent.agent.host.target import resolve
    from dsagent.agent.screens import terminal
    from dsagent.agent.session.loop import Session
    from dsagent.agent.session.overhead import give_way

    progress = terminal.Progress()
    with progress:
        progress.say(f"starting the bundled engine with {model} on a free port")
        arguments = ["--model", model, "--host", "127.0.0.1", "--port", "0"]
        with Child("dsagent.instrumentation.reference", arguments) as engine:
            url = engine.wait_for(r"listening on (http://\S+)", READY_S).group(1)
            load: list[Child] = []

            def send_load() -> None:
                progress.say(
                    f"attached to pid {engine.pid}; {duration:.0f} s of chats and long prompts"
                )
                load.append(
                    Child(
                        "dsagent.agent.load",
                        [url, "--model", model, "--duration", str(duration), "--seed", str(seed)],
                    )
                )
                load[0].on_exit(session.stop)
                give_way()  # only now: the children are to run as usual

            session = Session(
                resolve(engine.pid),
                max_overhead_ratio=MAX_OVERHEAD_RATIO,
                on_attached=send_load,
                on_live=progress.show,
            )
            try:
                with terminal.stopping_on_signals(session.stop):
                    summary = session.run()
            finally:
                for child in load:
                    child.stop()
            if engine.exit_code is not None:
                raise DsagentError(f"the engine ended by itself, with code {engine.exit_code}")
    if (load[0].exit_code or 0) > 0:
        raise DsagentError(f"the load ended by itself, with code {load[0].exit_code}")
    tally = tally_of(load[0].output)
    document = _document(summary, session, tally)
    if json:
        terminal.put_json(document)
    else:
        _show(document, summary, session)
    if complaint := complaint_of(tally):
        if not tally["requests"]:
            raise DsagentError(complaint)
        progress.say(complaint)


def tally_of(output: Sequence[str]) -> dict[str, Any]:
    """What the load counted: {requests, failed, elapsed_s}; empty where it was ended before it
    could say so."""
    return jsonlib.loads(output[-1]) if output else {}


def complaint_of(tally: dict[str, Any]) -> str:
    """What to say of requests that failed; empty where none did."""
    failed = tally.get("failed", 0)
    sent = failed + tally.get("requests", 0)
    return f"{failed} of {sent} requests failed" if failed else ""


def _document(summary: dict[str, Any], session: Session, tally: dict[str, Any]) -> dict[str, Any]:
    return {
        "requests": summary["requests"],
        "failed_requests": tally.get("failed"),
        "steps": summary["steps"],
        "tokens_per_second": session.counts.tokens / tally["elapsed_s"] if tally else None,
        "sources": summary["sources"],
        "uncounted_losses": summary["uncounted_losses"],
        "explained": session.ledger.showpieces(),
        "unattributed_ratio_p50": session.ledger.unattributed_ratio_p50(),
        "overhead": summary["overhead"],
    }


def _show(document: dict[str, Any], summary: dict[str, Any], session: Session) -> None:
    import time

    from dsagent.agent.screens import render, terminal
    from dsagent.agent.session.ledger import KEEP_NS

    terminal.put_text(render.summary(summary))
    terminal.put_text(render.rule("where the time of all requests went"))
    why = session.ledger.why(now_ns=time.monotonic_ns(), last_ns=KEEP_NS)
    terminal.put_text(render.why(why, "10m"))
    for index, explained in enumerate(document["explained"]):
        title = "the slowest request" if index == 0 else "the request most delayed by others"
        terminal.put_text(render.rule(title))
        terminal.put_text(render.explain(explained))
