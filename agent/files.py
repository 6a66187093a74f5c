"""Files that people name: read whole, bounded, and only where they are files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dsagent.agent.errors import USAGE, DsagentError

MAX_FILE_BYTES = 1 << 20


class Unreadable(DsagentError):  # noqa: N818 - what was found, not what went wrong
    """What was named is no file that can be read; nothing is known of what it says."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=USAGE)


def read_named(path: str | Path) -> bytes:
    """At most 1 MiB. Raises Unreadable (exit 2): it is larger, cannot be read, or is something
    that might keep the reader waiting for ever (a FIFO, a terminal)."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Unreadable(f"{path}: not a regular file")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a null byte in its name
        raise Unreadable(f"cannot read {str(path)!r}: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise Unreadable(f"{path} is larger than 1 MiB")
    return content


def _open_at_once(path: str, flags: int) -> int:
    """Opening a FIFO that nobody writes to would wait."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
