"""meta.json of a recording: that it is one, its version, and who wrote into it when."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.sinks.regular import open_regular
from dsagent.agent.sinks.schema import PART_SUFFIX, VERSION

FORMAT = "dsagent recording"
MAX_BYTES = 1 << 20
MAX_RUNS = 100  # the newest ones


def read_meta(directory: Path) -> dict[str, Any]:
    """Raises DsagentError where the folder is no recording, or one of another version."""
    try:
        with open_regular(directory / "meta.json") as file:
            meta = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError:
        raise DsagentError(f"{directory}: no recording there", exit_code=USAGE) from None
    except OSError as error:
        raise DsagentError(f"{directory}: {error.strerror or error}", exit_code=USAGE) from error
    except (ValueError, RecursionError) as error:
        raise DsagentError(f"{directory}/meta.json: not JSON", exit_code=USAGE) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DsagentError(f"{directory}/meta.json: not of a recording", exit_code=USAGE)
    if meta.get("version") != VERSION:
        raise DsagentError(
            f"{directory}: a recording of version {str(meta.get('version'))[:20]}, "
            f"this agent knows version {VERSION}",
            exit_code=USAGE,
        )
    runs = meta.get("runs")
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise DsagentError(f"{directory}/meta.json: runs is not a list", exit_code=USAGE)
    return meta


def new_meta() -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, "schema": "docs/schemas.md", "runs": []}


def write_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Whole or not at all."""
    meta["runs"] = meta["runs"][-MAX_RUNS:]
    part = directory / f"meta.json{PART_SUFFIX}"
    part.unlink(missing_ok=True)  # of a run that was killed; or something that opening waits for
    with open(part, "x", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.rename(part, directory / "meta.json")
