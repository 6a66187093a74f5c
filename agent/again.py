"""A recording attributed anew: what its sources once brought, by the rules of today."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from dsagent.agent.account import Account
from dsagent.agent.accountant import Accountant
from dsagent.agent.sinks.history import read_runs
from dsagent.agent.sinks.tables import tell


def attribute_again(
    directory: str | Path, *, tell: Callable[[str], None] = tell
) -> Iterator[Account]:
    """The accounts of the requests that the recording holds, in the order in which they were
    made: the same ones, by the version that recorded it. Raises DsagentError (exit 2) where there
    is no recording, or nothing of it can be read."""
    for run in read_runs(directory, tell=tell):
        accountant = Accountant(run.attached_ns)
        for poll in run.polls:
            accountant.look(poll.view)
            accountant.add(poll.readings)
            yield from accountant.due(poll.due_ns)
