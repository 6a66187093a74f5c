"""The command `dsagent`: signals and standard streams first, then everything else.

Imports next to nothing at the top: what is set up here must be in place before the first
import that takes its time, and be left by none of the windows in which a person hits Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys

if sys.version_info < (3, 11):  # the plug-in beside an engine runs on 3.10; its agent does not
    sys.exit("dsagent: the commands need Python 3.11 or later; this is " + sys.version.split()[0])


def leave_at_once(signum: int, _frame: object) -> None:
    """Ends the process with 128 plus the signal's number, as a shell would say it. Without
    unwinding: nothing here needs it (the kernel takes back BPF programs, sockets and children),
    and an exception out of a signal handler may be swallowed or shown as a traceback."""
    os._exit(128 + signum)


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, leave_at_once)
    from dsagent.agent import streams

    streams.reopen_missing()
    try:
        from dsagent.agent import app
    except ModuleNotFoundError as error:
        if (error.name or "dsagent").startswith("dsagent"):
            raise
        sys.exit("dsagent: the commands need more packages: pip install 'dsagent[agent]'")
    sys.exit(app.run(sys.argv[1:]))
