"""`dsagent roll`: a recording into a fleet's store, by hour."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsagent.agent.fleet.s3_options import S3CaFile, S3Endpoint
from dsagent.agent.settings import named_path, option


def roll(
    recording: Annotated[
        Path, typer.Argument(metavar="DIR", parser=named_path, help="The recording.")
    ],
    store: Annotated[str, typer.Argument(metavar="STORE", help="A folder, or s3://bucket/prefix.")],
    pod: Annotated[
        str | None,
        option(metavar="NAME", help="Whose recording it is; without it the host's name."),
    ] = None,
    unfinished_hour: Annotated[
        bool,
        option("--unfinished-hour", help="Also what there is of an hour that is not over."),
    ] = False,
    delete_source: Annotated[
        bool,
        option(
            "--delete-source",
            help="Remove from the recording what has been read back from the store, unless an "
            "agent is recording there.",
        ),
    ] = False,
    unmasked: Annotated[
        bool,
        option(
            "--unmasked",
            help="Let e-mail and IP addresses, telephone numbers and keys in names and texts go "
            "out as they are.",
        ),
    ] = False,
    s3_endpoint: S3Endpoint = None,
    s3_ca_file: S3CaFile = None,
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Roll a recording into a store of Parquet partitions by hour.

    The store is a folder or an S3-style bucket. Can be repeated: each segment is rolled once, and
    what an interrupted run left is done anew. Ends with 1 where something could not be read.

    \b
    Examples:
      dsagent roll run1 /srv/fleet --pod llama-7c9f
      dsagent roll run1 s3://telemetry/fleet --s3-endpoint https://objects.example.com
    """
    import socket

    from dsagent.agent.errors import FINDINGS, USAGE, DsagentError
    from dsagent.agent.fleet.manifest import is_pod
    from dsagent.agent.fleet.roll import roll as roll_recording
    from dsagent.agent.fleet.store import open_store
    from dsagent.agent.screens import terminal
    from dsagent.agent.sinks.tables import FILES_TOLD
    from dsagent.agent.sinks.tables import tell as tell_left_out

    name = pod or socket.gethostname()
    if not is_pod(name):
        raise DsagentError(
            f"{name[:80]!r} is no pod's name: letters, digits, dots and dashes; say --pod NAME",
            exit_code=USAGE,
        )
    progress = terminal.Progress()
    done = roll_recording(
        recording,
        open_store(store, s3_endpoint, s3_ca_file),
        name,
        unfinished_hour=unfinished_hour,
        delete_source=delete_source,
        is_masked=not unmasked,
        tell=progress.say,
    )
    for line in done.left_out[:FILES_TOLD]:
        tell_left_out(f"left out: {line}")
    if json:
        terminal.put_json(done.json())
    else:
        terminal.put_text(_summary(done.json()))
    return FINDINGS if done.left_out else 0


def _summary(done: dict[str, object]) -> str:
    lines = [
        f"{done['segments_rolled']} segments rolled into {done['store']} as pod {done['pod']}: "
        f"{done['rows']:,} rows"
    ]
    for count, meaning in (
        ("segments_before", "had been rolled before"),
        ("segments_waiting", "wait for the end of their hour"),
        ("segments_gone", "were removed by the agent's cap meanwhile"),
        ("segments_left_out", "cannot be read and are left out"),
        ("segments_deleted", "deleted from the recording"),
    ):
        if done[count]:
            lines.append(f"{done[count]} {meaning}")
    return "\n".join(lines)
