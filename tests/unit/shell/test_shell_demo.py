"""What the demo says of a load that did not go well."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import asdict

import pytest

from dsagent.agent import load
from dsagent.agent.commands.demo import complaint_of, tally_of


def test_a_server_that_answers_nothing_fails_every_request() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    tally = asyncio.run(load.run(load.Server("127.0.0.1", port, "m"), 0.6, 0))
    assert tally.requests == 0
    assert tally.failed > 0
    said = complaint_of(tally_of([json.dumps(asdict(tally))]))
    assert said == f"{tally.failed} of {tally.failed} requests failed"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (["{}"], ""),
        ([], ""),  # ended before it could say
        (['{"requests": 9, "failed": 0, "elapsed_s": 1.0}'], ""),
        (['{"requests": 9, "failed": 1, "elapsed_s": 1.0}'], "1 of 10 requests failed"),
    ],
)
def test_failed_requests_are_said(output: list[str], said: str) -> None:
    assert complaint_of(tally_of(output)) == said
