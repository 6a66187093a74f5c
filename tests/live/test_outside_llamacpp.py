"""llama.cpp's own server, into which nothing is put: what is seen agrees with its client, with its
own counts, and with a fault."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kernel_lab import require_kernel_source
from llamacpp import Asked, LlamaServer
from smollm2_reference import gguf_path
from watching import Watching, until

from dsagent.agent.host.server_target import find_target

MS = 1_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaServer]:
    require_kernel_source()
    with LlamaServer(gguf_path()) as running:
        yield running


@pytest.fixture(scope="module")
def seen(server: LlamaServer) -> tuple[list[Asked], list[dict[str, Any]], dict[str, Any], float]:
    """Requests one by one and together; their accounts, the summary, the server's own steps."""
    with Watching(find_target(server.pid, "auto", print)) as watching:
        before = server.metric("llamacpp:n_decode_total")
        asked = [server.ask(16) for _ in range(5)] + server.ask_together(3, 16)
        steps = server.metric("llamacpp:n_decode_total") - before
        accounts = [watching.explain(each.trace_id) for each in asked]
        served = watching.session._feeds.feed("served")
        until(lambda: "seen by us" in served.status().reason, "the counts were never compared")
        document = watching.stop()
    return asked, accounts, document, steps


def test_the_clients_times_are_ours(
    seen: tuple[list[Asked], list[dict[str, Any]], dict[str, Any], float],
) -> None:
    asked, accounts, _, _ = seen
    for ours, theirs in (("ttft_ns", "ttft_ns"), ("tpot_ns", "tpot_ns")):
        pairs = [
            (float(account[ours]), float(getattr(each, theirs)))
            for each, account in zip(asked, accounts, strict=True)
        ]
        off_ns = statistics.median(abs(a - b) for a, b in pairs)
        assert off_ns <= max(5 * MS, 0.02 * statistics.median(b for _, b in pairs)), pairs


def test_the_requests_are_theirs(
    seen: tuple[list[Asked], list[dict[str, Any]], dict[str, Any], float],
) -> None:
    asked, accounts, document, _ = seen
    assert document["requests"] == len(asked) and document["engine"] == "http"
    assert document["accounting_failures"] == document["uncounted_losses"] == 0
    for each, account in zip(asked, accounts, strict=True):
        assert account["trace_id"] == each.trace_id
        assert account["request_id"].startswith("chatcmpl-")
        assert account["output_tokens"] == 16 and account["finish_reason"] == "length"
        assert account["prompt_tokens"] and not account["partial"] and account["inferred"]
        assert (
            sum(p["ns"] for p in account["parts"]) + account["unattributed_ns"]
            == (account["e2e_ns"])
        )


def test_its_steps_are_counted(
    seen: tuple[list[Asked], list[dict[str, Any]], dict[str, Any], float],
) -> None:
    _, _, document, steps = seen
    assert document["steps"] == pytest.approx(steps, rel=0.02, abs=1)
    served = next(source for source in document["sources"] if source["name"] == "served")
    assert served["state"] == "ok" and "tokens.generated" in served["reason"]


def test_only_what_the_kernel_says_is_called_measured(
    seen: tuple[list[Asked], list[dict[str, Any]], dict[str, Any], float],
) -> None:
    _, accounts, _, _ = seen
    for account in accounts:
        for part in (*account["parts"], *account["ttft_parts"]):
            if part["how"] == "measured":
                assert {each["source"] for each in part["evidence"]} & {"kernel"}, part


def test_a_stop_is_seen(server: LlamaServer) -> None:
    with Watching(find_target(server.pid, "outside", print)) as watching:
        server.ask(8)
        found: list[Asked] = []
        client = threading.Thread(target=lambda: found.append(server.ask(40)))
        client.start()
        # It has begun: its steps are seen.
        until(lambda: watching.session.counts.steps > 10, "no steps")
        before_ns = time.monotonic_ns()
        os.kill(server.pid, signal.SIGSTOP)
        threading.Event().wait(0.5)
        os.kill(server.pid, signal.SIGCONT)
        most_ns = time.monotonic_ns() - before_ns
        client.join()
        account = watching.explain(found[0].trace_id)
    stopped = next(p for p in account["parts"] if p["cause"] == "process.stopped")
    assert stopped["how"] == "measured"
    assert 400 * MS < stopped["ns"] <= most_ns + 20 * MS
