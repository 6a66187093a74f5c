"""stdin, stdout and stderr may be missing, full or hung up on; no command breaks over that."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from dsagent.agent.errors import DsagentError


def reopen_missing() -> None:
    """Puts /dev/null where a standard stream was closed, so that no file or socket opened later
    takes its number and is written to as if it were the stream."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free: this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115


def put(text: str) -> None:
    """Text on stdout, at once. Raises DsagentError where it cannot be written; a reader that has
    hung up (a pager, head) has seen enough."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        give_up(sys.stdout)
    except OSError as error:
        give_up(sys.stdout)
        raise DsagentError(f"cannot write the result: {error.strerror}") from error


def tell(text: str) -> None:
    """Text on stderr, at once; where it cannot be written, there is nobody to be told."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        give_up(sys.stderr)


def give_up(stream: TextIO) -> None:
    """What is still in the stream, and all that follows, goes to /dev/null: Python would
    complain at its exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
