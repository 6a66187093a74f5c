"""`dsagent retain`: a fleet's store kept as long as a policy says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsagent.agent.fleet.s3_options import S3CaFile, S3Endpoint
from dsagent.agent.settings import named_path, option


def retain(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A folder, or s3://bucket/prefix.")],
    policy: Annotated[
        Path,
        option(metavar="FILE", parser=named_path, help="How long each tier is kept (TOML)."),
    ],
    dry_run: Annotated[
        bool, option("--dry-run", help="Say what would go; change nothing.")
    ] = False,
    s3_endpoint: S3Endpoint = None,
    s3_ca_file: S3CaFile = None,
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Add a store up by hour, and delete what is older than kept.

    Raw files go only when what they add up to has been read back from the store, and nothing is
    touched but the files that `roll` and `retain` make. Ends with 1 where raw files had to be kept.

    \b
    Examples:
      dsagent retain /srv/fleet --policy deploy/fleet/7-90.toml --dry-run
      dsagent retain s3://telemetry/fleet --policy 3-60.toml
    """
    from dsagent.agent import streams
    from dsagent.agent.errors import FINDINGS
    from dsagent.agent.fleet.policy import load_policy
    from dsagent.agent.fleet.retain import retain as apply
    from dsagent.agent.fleet.store import open_store
    from dsagent.agent.host.procfs import escape
    from dsagent.agent.screens import terminal

    rules = load_policy(policy)
    progress = terminal.Progress()
    done = apply(
        open_store(store, s3_endpoint, s3_ca_file, must_exist=True),
        rules,
        dry_run=dry_run,
        tell=progress.say,
    )
    for line in done.raw_kept:
        streams.tell(f"dsagent: kept: {escape(line, limit=500)}\n")
    document = done.json()
    if json:
        terminal.put_json(document)
    else:
        goes = "would go" if dry_run else "deleted"
        lines = [
            f"{each['tier']} {each['hour']}: {each['files']} files, "
            f"{each['bytes'] / 1e6:.1f} MB {goes}"
            for each in document["deleted"]
        ]
        added = "would be added up" if dry_run else "added up"
        lines.append(
            f"{document['files_deleted']} files, {document['bytes_deleted'] / 1e6:.1f} MB {goes}; "
            f"{document['batches_added_up']} batches {added}"
        )
        streams.put("".join(f"{line}\n" for line in lines))
    return FINDINGS if done.raw_kept else 0
