"""`dsagent attach` and `explain` on a real vLLM server with the plug-in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watched import Watched, at_once

from dsagent.instrumentation.ring import Role

DSAGENT = str(Path(sys.executable).with_name("dsagent"))
TRACE_ID, SPAN_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
TRACEPARENT = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"
PATIENCE_S = 90.0
ROOT = os.geteuid() == 0  # the kernel's facts need it


class Agent:
    """A running `dsagent attach`."""

    def __init__(self, pid: int, output: Path) -> None:
        self.output = output
        with output.open("wb") as out:
            self.process = subprocess.Popen(
                [DSAGENT, "attach", str(pid), "--json"],
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert self.process.stderr is not None
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if line.startswith("attached to"):
                return
        raise AssertionError(f"never attached: {self.said}")

    def end(self) -> dict[str, Any]:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE_S) == 0
        assert self.process.stderr is not None
        self.process.stderr.close()
        document = json.loads(self.output.read_text())
        assert isinstance(document, dict)
        return document


@pytest.fixture(scope="module")
def explained(
    served: Watched, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """One request among others, explained; the agent's summary; what it said."""
    served.read()
    agent = Agent(served.pids[Role.SCHEDULER], tmp_path_factory.mktemp("agent") / "summary.json")
    try:
        body = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}
        long = {"prompt": "words " * 500, "max_tokens": 2, "ignore_eos": True}
        reply, *_ = at_once(
            [
                lambda: served.stream("/v1/completions", body, traceparent=TRACEPARENT),
                lambda: served.server.post("/v1/completions", long),
                lambda: served.server.post("/v1/completions", {**body, "prompt": "And"}),
            ]
        )
        record = served.record(reply.id)

        def ask() -> dict[str, Any] | None:
            asked = [
                DSAGENT,
                "explain",
                f"{TRACE_ID:032x}",
                "--json",
                "--pid",
                str(served.server.pid),
            ]
            ran = subprocess.run(asked, capture_output=True, text=True, check=False)
            account = json.loads(ran.stdout) if ran.returncode == 0 else {}
            return account if account.get("finished") else None

        account = served.until(ask, "the account")
        account["record"] = record
    finally:
        summary = agent.end()
    yield account, summary, "".join(agent.said)


def test_the_target_is_the_server(served: Watched, explained: Any) -> None:
    _, summary, said = explained
    assert summary["target"]["pid"] == served.server.pid
    assert summary["engine"] == "vllm"
    assert f"(pid {served.server.pid}), engine vllm" in said
    assert summary["requests"] == 3
    assert summary["uncounted_losses"] == 0
    assert summary["accounting_failures"] == 0
    steps = next(source for source in summary["sources"] if source["name"] == "steps")
    assert (steps["state"], steps["dropped"]) == ("ok", 0)


def test_the_parts_add_up(explained: Any) -> None:
    account, _, _ = explained
    record = account["record"]
    assert account["request_id"] == record.request_id
    assert account["e2e_ns"] == record.e2e_ns
    parts = {part["cause"]: part["ns"] for part in account["parts"]}
    assert sum(parts.values()) + account["unattributed_ns"] == account["e2e_ns"]
    assert all(ns > 0 for ns in parts.values())
    ttft = sum(part["ns"] for part in account["ttft_parts"])
    assert ttft + account["ttft_unattributed_ns"] == account["ttft_ns"] == record.ttft_ns
    assert account["steps"] >= record.output_tokens
    assert account["output_tokens"] == record.output_tokens == 12
    assert {"decode.compute", "prefill.compute", "frontend.in", "engine.host"} <= set(parts)
    # The long prompt shared its steps, or kept it waiting.
    assert {delay["request_id"] for delay in account["delayed_by"]}


@pytest.mark.ebpf
@pytest.mark.skipif(not ROOT, reason="needs root")
def test_the_kernel_tells_of_its_steps(explained: Any) -> None:
    account, summary, _ = explained
    kernel = next(source for source in summary["sources"] if source["name"] == "kernel")
    assert kernel["state"] == "ok", kernel["reason"]
    sources = {item["source"] for part in account["parts"] for item in part["evidence"]}
    assert "kernel" in sources
