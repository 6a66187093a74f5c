"""The one error a command may end with: a line for a person and an exit code."""

from __future__ import annotations

FINDINGS = 1  # findings, or an operation that failed
USAGE = 2  # wrong use, or nothing there
CANNOT_ATTACH = 3


class DsagentError(Exception):
    """What went wrong, why, and what to do, in one line; `exit_code` tells scripts which."""

    def __init__(self, message: str, *, exit_code: int = FINDINGS) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class SourceUnavailable(Exception):  # noqa: N818
    """A source cannot run here; the text is the reason shown to people."""
