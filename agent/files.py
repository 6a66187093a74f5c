"""Files that people name: read whole, bounded, and only where they are files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dsagent.agent.errors import USAGE, DsagentError

MAX_FILE_BYTES = 1 << 20


def read_named(path: str | Path) -> bytes:
    """At most 1 MiB. Raises DsagentError (exit 2): it is larger, cannot be read, or is something
    that might keep the reader waiting for ever (a FIFO, a terminal)."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DsagentError(f"{path}: not a regular file", exit_code=USAGE)
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise DsagentError(f"cannot read {path}: {error.strerror}", exit_code=USAGE) from error
    except ValueError as error:  # a null byte in its name
        raise DsagentError(f"cannot read {str(path)!r}: {error}", exit_code=USAGE) from error
    if len(content) > MAX_FILE_BYTES:
        raise DsagentError(f"{path} is larger than 1 MiB", exit_code=USAGE)
    return content


def _open_at_once(path: str, flags: int) -> int:
    """Opening a FIFO that nobody writes to would wait."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
