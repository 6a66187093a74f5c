"""A real vLLM seen from outside, held against what its own rings and its client say."""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from watched import Reply, Watched, at_once

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))

from kernel_lab import require_kernel_source
from watching import Watching

from dsagent.agent.host.server_target import find_target
from dsagent.agent.sources.outside import source
from dsagent.instrumentation.records import Step

MS = 1_000_000
ASKED = 6


Seen = tuple[dict[str, Reply], dict[str, Any], dict[str, Any], list[Step]]


def watch(served: Watched, first: int) -> Seen:
    """trace id → the client's reply, and the account; the summary; the true steps meanwhile."""
    served.read()
    before = len(served.steps)
    replies: dict[str, Reply] = {}

    def ask(number: int) -> None:
        trace_id = f"{first + number:032x}"
        body = {"prompt": f"Tell me about {number} cats", "max_tokens": 12, "ignore_eos": True}
        header = {"traceparent": f"00-{trace_id}-00000000000000aa-01"}
        replies[trace_id] = served.stream("/v1/completions", body, **header)

    with Watching(find_target(served.server.pid, "outside", print)) as watching:
        for number in range(ASKED // 2):
            ask(number)
        at_once([functools.partial(ask, number) for number in range(ASKED // 2, ASKED)])
        accounts = {trace_id: watching.explain(trace_id) for trace_id in replies}
        document = watching.stop()
    served.read()
    return replies, accounts, document, served.steps[before:]


@pytest.fixture(scope="module")
def seen(served: Watched) -> Seen:
    require_kernel_source()
    served.stream("/v1/completions", {"prompt": "warm up", "max_tokens": 4})
    return watch(served, 0xF00)


def test_the_clients_own_traces_and_vllms_own_ids(seen: Seen) -> None:
    replies, accounts, document, _ = seen
    assert document["requests"] == len(replies) == ASKED
    for trace_id, account in accounts.items():
        assert account["trace_id"] == trace_id
        assert account["request_id"] == replies[trace_id].id
        assert account["output_tokens"] == replies[trace_id].usage["completion_tokens"]
        assert account["inferred"] and account["finish_reason"] == "length"


def test_steps_are_inferred_within_a_fiftieth(seen: Seen) -> None:
    _, _, document, steps = seen
    assert document["steps"] == pytest.approx(len(steps), rel=0.02, abs=1)


def test_the_clients_times_are_ours(seen: Seen) -> None:
    replies, accounts, _, _ = seen
    # Of those asked one by one: several clients in one process keep each other waiting.
    alone = list(replies.items())[: ASKED // 2]
    first = [
        (accounts[trace_id]["ttft_ns"], reply.first_ns - reply.sent_ns) for trace_id, reply in alone
    ]
    off_ns = statistics.median(abs(ours - theirs) for ours, theirs in first)
    assert off_ns <= max(5 * MS, 0.02 * statistics.median(theirs for _, theirs in first)), first


def test_without_a_function_the_cores_sends_tell_the_steps(
    served: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_kernel_source()
    monkeypatch.setattr(source, "find_markers", lambda _pids: None)
    _, accounts, document, steps = watch(served, 0xE00)
    told = next(each for each in document["sources"] if each["name"] == "steps")
    assert "the engine's core sends its output" in told["reason"]
    assert len(accounts) == ASKED
    # Rougher than a function's calls: an output may be sent in two parts.
    assert document["steps"] == pytest.approx(len(steps), rel=0.08, abs=1)
