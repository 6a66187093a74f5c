"""The main job on the real engine with a tiny model: serve, attach, ask, explain."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
from shell_lab import COMMAND, Agent, Child, Server, add_up, asked, dsagent

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def test_serve_attach_explain(server: Server, tmp_path: os.PathLike[str]) -> None:
    recording = os.path.join(tmp_path, "recording")
    with Agent(server.pid, "--json", "--record", recording) as agent:
        attached = agent.attached().err[-1]
        assert f"(pid {server.pid})" in attached  # serve became the engine
        reply = server.complete(TRACE, "ticket-1")
        for number in range(2, 6):
            server.complete(f"{number:032x}", f"ticket-{number}")
        document = asked("explain", TRACE, "--pid", str(server.pid))
        assert document["output_tokens"] == reply["usage"]["completion_tokens"] == 8
        assert document["prompt_tokens"] == reply["usage"]["prompt_tokens"]
        assert document["external_id"] == "ticket-1"
        assert document["model"] == "tiny-llama"
        assert document["finished"] is True
        add_up(document)
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 0
        summary = agent.document()
    assert summary["requests"] == 5
    assert summary["uncounted_losses"] == 0
    assert [sink["name"] for sink in summary["sinks"]] == ["recording"]
    assert summary["sinks"][0]["failed"] == summary["sinks"][0]["dropped"] == 0
    recorded = asked("explain", "ticket-1", "--recording", recording)
    assert recorded["trace_id"] == TRACE
    assert recorded["e2e_ns"] == document["e2e_ns"]
    add_up(recorded)
    assert asked("why", "--recording", recording)["requests"] == 5


def test_attach_right_after_serve_as_the_readme_has_it() -> None:
    """`serve & attach $!`: the engine has no ring yet, and is waited for."""
    with (
        Child([COMMAND, "serve", "--model", "tiny-llama", "--port", "0"]) as server,
        Agent(server.pid, "--json") as agent,
    ):
        agent.attached()
        assert any("waiting for process" in line for line in agent.err)
        agent.signal(signal.SIGINT)
        assert agent.wait() == 0
        assert agent.document()["target"]["pid"] == server.pid


def test_an_engine_that_ends_while_it_is_waited_for_is_an_error() -> None:
    with (
        Child([COMMAND, "serve", "--model", "tiny-llama", "--port", "0"]) as server,
        Agent(server.pid) as agent,
    ):
        agent.wait_line(lambda line: line.startswith("waiting for process"))
        server.signal(signal.SIGKILL)
        assert agent.wait() == 3
        assert agent.err[-1].startswith("dsagent: cannot attach: ")


def test_serve_refuses_in_one_line() -> None:
    ran = dsagent("serve", "--model", "no-such-model", check=False)
    assert ran.returncode != 0
    assert "no-such-model" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert dsagent("serve", check=False).returncode == 2


def children_of(pid: int) -> set[int]:
    from dsagent.agent.host import procfs

    return set(procfs.descendants(pid, procfs.parents()))


def test_demo_shows_everything_and_leaves_nothing() -> None:
    with Child([COMMAND, "demo", "--model", "tiny-llama", "--duration", "2", "--json"]) as demo:
        demo.wait_line(lambda line: line.startswith("attached to "))
        children = children_of(demo.pid)
        assert children
        assert demo.wait() == 0
        document = demo.document()
    assert document["requests"] >= 5
    assert document["steps"] > document["requests"]
    assert document["tokens_per_second"] > 0
    assert document["failed_requests"] == 0
    assert document["uncounted_losses"] == 0
    assert {source["name"]: source["state"] for source in document["sources"]}["steps"] == "ok"
    assert 0 <= document["unattributed_ratio_p50"] <= 1
    assert document["explained"]
    for explained in document["explained"]:
        add_up(explained)
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}/exe")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_ended_takes_its_engine_along(number: signal.Signals) -> None:
    with Child([COMMAND, "demo", "--model", "tiny-llama", "--duration", "600"]) as demo:
        line = demo.wait_line(lambda line: line.startswith("attached to "))
        pid = int(re.findall(r"pid (\d+)", line)[0])
        pidfd = os.pidfd_open(pid)
        try:
            demo.signal(number)
            code = demo.wait()
            assert code == (-number if number is signal.SIGKILL else 0)
            assert wait_ended(pidfd)
        finally:
            os.close(pidfd)


def wait_ended(pidfd: int) -> bool:
    import select

    return bool(select.select([pidfd], [], [], 60.0)[0])
