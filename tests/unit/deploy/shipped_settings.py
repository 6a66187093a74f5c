"""A settings file and variables as the sidecar itself reads them, by its own parser."""

from __future__ import annotations

from pathlib import Path

import typer

from dsagent.agent import app
from dsagent.agent.sidecar.options import SidecarOptions
from dsagent.agent.sidecar.reader import Reading, SettingsReader, parser_of

COMMAND = "sidecar"


def read(file: Path) -> SidecarOptions:
    """Raises DsagentError for a key or value that the sidecar would refuse. Variables count."""
    made, _, its_file = app.build(["--config", str(file), COMMAND])
    assert its_file is not None
    group = typer.main.get_command(made)
    command = group.commands[COMMAND]  # type: ignore[attr-defined]
    with command.make_context(COMMAND, [], obj=Reading()) as context:
        return SettingsReader(its_file, parser_of(context, ())).read()
