"""`dsagent detach`: ends the agent of a server, and takes out the hooks that were injected."""

from __future__ import annotations

from typing import Annotated

import typer

from dsagent.agent.settings import option


def detach(
    pid: Annotated[int, typer.Argument(metavar="PID", min=1, help="Any process of the server.")],
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Take injected hooks out of a running server again.

    Those that `attach --instrument inject` has put in. An agent that watches the server is ended
    first. What the server had before is there again, the same objects; nothing of ours is left.

    \b
    Examples:
      dsagent detach 4242
    """
    from dsagent.agent.errors import FINDINGS, USAGE, DsagentError
    from dsagent.agent.inject import way_in
    from dsagent.agent.inject.interpreter import CannotInject
    from dsagent.agent.screens import terminal

    progress = terminal.Progress()
    found: tuple[way_in.Process, ...] = ()
    refused: CannotInject | None = None
    try:
        found = way_in.processes(pid)
        ended = way_in.end_agent(found)
    except CannotInject as error:  # an agent can be ended all the same, whatever serves there
        refused = error
        ended = way_in.end_agent_of(pid)
    if ended:
        progress.say("the agent has ended")
    if refused is not None and not (ended and isinstance(refused, way_in.NoVllm)):
        why = refused.reason if ended else f"{refused.reason}, and no dsagent is attached there"
        raise DsagentError(f"cannot detach: {why}", exit_code=refused.exit_code) from refused
    done = []
    for each in way_in.take(found):
        progress.say(each.line)
        done.append(each)
    if json:
        terminal.put_json({"agent_ended": ended, "processes": [each.document() for each in done]})
    if any(each.failed for each in done):
        return FINDINGS
    if not ended and all(each.nothing for each in done):
        raise DsagentError(f"nothing was injected into the server of {pid}", exit_code=USAGE)
    return 0
