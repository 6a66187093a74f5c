"""A recording attributed anew: what its sources once brought, by the rules of today."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsagent.agent.attribution.account import Account
from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.sinks.history import read_runs
from dsagent.agent.sinks.tables import tell

OBJECTS_BETWEEN_LOOKS = 200_000


def attribute_again(
    directory: str | Path, *, tell: Callable[[str], None] = tell
) -> Iterator[Account]:
    """The accounts of the requests that the recording holds, in the order in which they were
    made: the same ones, by the version that recorded it. Raises DsagentError (exit 2) where there
    is no recording, or nothing of it can be read."""
    with _garbage_looked_for_rarely():
        for run in read_runs(directory, tell=tell):
            accountant = Accountant(run.attached_ns)
            for poll in run.polls:
                accountant.look(poll.view)
                accountant.add(poll.readings)
                yield from accountant.due(poll.due_ns)


@contextmanager
def _garbage_looked_for_rarely() -> Iterator[None]:
    """Hundreds of thousands of records are kept for a while, and none is part of a cycle: looking
    for those would be an eighth of the work."""
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_BETWEEN_LOOKS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
