"""Attaching for real: what it says, how it ends, what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from shell_lab import Agent, Engine, add_up, asked, dsagent

from dsagent.agent.listening import control

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


def test_questions_while_attached_and_the_summary_at_the_end(engine: Engine) -> None:
    pid = str(engine.pid)
    with Agent(engine.pid, "--json") as agent:
        agent.attached()
        engine.do(f"request r1 {TRACEPARENT}")
        for number in range(2, 8):
            engine.do(f"request r{number}")
        for wanted in (TRACE, TRACEPARENT, "r1", "ext-r1", TRACE[:8]):
            document = asked("explain", wanted, "--pid", pid)
            assert (document["request_id"], document["trace_id"]) == ("r1", TRACE)
            assert document["steps"] == 6
            add_up(document)
        slowest = asked("explain", "--pid", pid)
        assert len(slowest["others"]) == 5
        assert slowest["e2e_ns"] >= max(other["e2e_ns"] for other in slowest["others"])
        engine.do("open r9")
        unfinished = asked("explain", "r9", "--pid", pid)
        assert unfinished["finished"] is False
        add_up(unfinished)
        why = asked("why", "--pid", pid)
        assert why["requests"] == 7
        assert sum(cause["ratio"] for cause in why["causes"]) == pytest.approx(1.0)
        assert len(why["worst"]) == 7
        missing = dsagent("explain", "nobody", "--pid", pid, check=False)
        assert (missing.returncode, missing.stdout) == (2, "")
        assert missing.stderr.startswith("dsagent: no request 'nobody'")
        agent.signal(signal.SIGINT)
        assert agent.wait() == 0
        summary = agent.document()
    assert (summary["steps"], summary["requests"], summary["uncounted_losses"]) == (42, 7, 0)
    assert summary["target"]["pid"] == engine.pid
    assert summary["engine"] == "reference"
    assert summary["sinks"] == []
    states = {source["name"]: source["state"] for source in summary["sources"]}
    assert list(states) == ["steps", "kernel", "proc", "stall", "nvml"]
    assert states["steps"] == states["proc"] == states["stall"] == "ok"
    assert 0 <= summary["clock_error_ns"] < 50_000_000
    assert set(summary["overhead"]) == {"ratio", "agent_cpu_ratio", "agent_pss_bytes"}
    assert summary["overhead"]["agent_pss_bytes"] < 120_000_000


def end_by_sigterm(_engine: Engine, agent: Agent) -> None:
    agent.signal(signal.SIGTERM)


def end_by_death(engine: Engine, _agent: Agent) -> None:
    asked("explain", "r1", "--pid", str(engine.pid))  # seen: a ring cannot be opened any more
    os.kill(engine.engine_pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [end_by_sigterm, end_by_death])
def test_it_ends_in_order(engine: Engine, end: Callable[[Engine, Agent], None]) -> None:
    with Agent(engine.pid, "--json") as agent:
        agent.attached()
        engine.do("request r1")
        end(engine, agent)
        assert agent.wait() == 0
        assert (agent.document()["requests"], agent.document()["uncounted_losses"]) == (1, 0)
    assert engine.pid not in control.running()


def test_duration_counts_from_attached_and_settings_come_from_everywhere(
    engine: Engine, tmp_path: os.PathLike[str]
) -> None:
    config = os.path.join(tmp_path, "dsagent.toml")
    with open(config, "w") as file:
        file.write("duration = 900\njson = true\n")
    env = {"DSAGENT_CONFIG": config, "DSAGENT_DURATION": "0.5"}
    with Agent(engine.pid, env=env) as agent:  # the variable wins over the file
        assert agent.wait() == 0
        duration_ns = agent.document()["duration_ns"]
        assert duration_ns >= 500_000_000
        assert any(line.startswith("attached to ") for line in agent.err)


def test_killed_it_leaves_no_socket_and_the_engine_serving(engine: Engine) -> None:
    with Agent(engine.pid) as agent:
        agent.attached()
        assert engine.pid in control.running()
        agent.signal(signal.SIGKILL)
        assert agent.wait() == -signal.SIGKILL
    assert engine.pid not in control.running()
    engine.do("request r1")
    with Agent(engine.pid, "--duration", "0.1") as agent:
        assert agent.wait() == 0


def test_only_one_agent_a_target(engine: Engine) -> None:
    with Agent(engine.pid) as agent:
        agent.attached()
        second = dsagent("attach", str(engine.pid), check=False)
        assert second.returncode == 3
        assert "another dsagent is attached" in second.stderr
        agent.signal(signal.SIGINT)
        assert agent.wait() == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_sinks_by_their_flags_and_a_back_end_that_refuses(engine: Engine) -> None:
    port, dead = free_port(), free_port()
    flags = ("--prometheus", f"127.0.0.1:{port}", "--otlp-endpoint", f"http://127.0.0.1:{dead}")
    with Agent(engine.pid, "--json", *flags, "--slo", "/nonexistent.yaml") as agent:
        assert agent.wait() == 2
        assert agent.err[-1].startswith("dsagent: cannot read /nonexistent.yaml: ")
    with Agent(engine.pid, "--json", *flags) as agent:
        agent.attached()
        engine.do(f"request r1 {TRACEPARENT}")
        asked("explain", "r1", "--pid", str(engine.pid))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        assert "dsagent_requests_total" in text
        agent.signal(signal.SIGINT)
        assert agent.wait() == 0
        sinks = {sink["name"]: sink for sink in agent.document()["sinks"]}
    assert sinks["prometheus"]["acknowledged"] == 1
    assert sinks["otlp"]["acknowledged"] == 0
    assert sinks["otlp"]["failed"] + sinks["otlp"]["dropped"] > 0


def test_a_port_in_use_is_said_and_nothing_stays(engine: Engine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = dsagent("attach", str(engine.pid), "--prometheus", address, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"dsagent: cannot listen on {address}")
    assert ran.stderr.count("\n") == 1
    assert engine.pid not in control.running()


def test_text_for_people(engine: Engine) -> None:
    with Agent(engine.pid, "--duration", "1.5") as agent:
        agent.attached()
        engine.do("request r1")
        text = dsagent("explain", "r1", "--pid", str(engine.pid)).stdout
        assert "request r1 (ext-r1)\ntrace   " in text
        assert "decode.compute" in text
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 80
        assert agent.wait() == 0
        assert "1 request, 6 steps" in "\n".join(agent.out)
