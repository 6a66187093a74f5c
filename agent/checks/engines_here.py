"""The engines that run here, for whoever has no pid, or one that is none."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from dsagent.agent.errors import DsagentError
from dsagent.agent.host.command_names import command_name
from dsagent.agent.host.procfs import ProcessGone
from dsagent.agent.host.server_target import resolve_server
from dsagent.agent.host.target import resolve
from dsagent.agent.sidecar.scanner import Found, Scanner, WayIn

MAX_LISTED = 4
WORDS: dict[WayIn, str] = {"rings": "step rings", "outside": "from outside"}


@dataclass(frozen=True, slots=True)
class EngineHere:
    """`pid`: of the server's root. `command`: masked and safe to show."""

    pid: int
    way_in: WayIn
    command: str


def engines_here(scanner: Scanner) -> list[EngineHere]:
    """One for each server that can be attached to, by pid."""
    found: dict[int, EngineHere] = {}
    looked = scanner.look(time.monotonic_ns(), ())
    for each in sorted(looked, key=lambda one: one.way_in != "rings"):
        root = _root(each)
        if root is not None and root not in found:
            found[root] = EngineHere(root, each.way_in, command_name(root))
    return sorted(found.values(), key=lambda engine: engine.pid)


def _root(found: Found) -> int | None:
    try:
        target = resolve(found.pid) if found.way_in == "rings" else resolve_server(found.pid)
    except (DsagentError, ProcessGone, OSError):  # it has ended, or is not ours to look into
        return None
    return target.pid


def told() -> str:
    """The engines in half a sentence."""
    scanner = Scanner()
    engines = engines_here(scanner)
    listed = [f"{each.pid} ({WORDS[each.way_in]}: {each.command})" for each in engines]
    text = f"engines here: {', '.join(listed[:MAX_LISTED])}" if listed else "no engine is seen here"
    if len(listed) > MAX_LISTED:
        text += f" and {len(listed) - MAX_LISTED} more"
    barred = scanner.status.not_permitted
    if barred and not listed:
        advice = ": run as root" if os.geteuid() else ""
        text += f" (of {barred} of the processes it cannot be told{advice})"
    return text
