"""Our boards on a real engine, a real agent and a real Prometheus that scrapes both: no dead panel.
And the doctor finds one as soon as a metric is called otherwise."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from watching import until

from dsagent.agent.host.children import Child
from dsagent.dashboards.generate import GENERATED

MODEL = "tiny-llama"
READY_S = 120.0
# What may be missing on a machine without a GPU, while nothing goes wrong.
EXPECTED = (
    "the source nvml is unavailable",
    "it has not happened yet",
    "the engine shows no such figure of its own",
    "the model has no experts, or makes no drafts",
    "there is no source",
    "the target's cgroup has no quota",
    "no series now with",
    "nothing passes its comparison now",
    "no budget has burnt yet",
    "the agent has no SLO file",
    "no request was judged yet",
    "the SLO file has no cache alert, or nothing was looked up",
    "the agent has no sink that keeps a ledger",
    "the agent does not watch for anomalies",
    "the server makes it, where there is something to tell",
    "its rules have not been evaluated yet",
)


@dataclass(frozen=True, slots=True)
class Stack:
    """Addresses."""

    prometheus: str
    agent: str
    engine: str


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def answers(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            body: bytes = response.read()
    except OSError:
        return None
    return body or b"-"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus here (apt install prometheus)")
    if os.geteuid() != 0:
        pytest.skip("needs root to attach with every source")
    folder = tmp_path_factory.mktemp("stack")
    arguments = ["--model", MODEL, "--host", "127.0.0.1", "--port", "0"]
    with Child("dsagent.instrumentation.reference", arguments) as engine:
        url = engine.wait_for(r"listening on (http://\S+)", READY_S).group(1)
        agent, server = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        config = {
            "global": {"scrape_interval": "1s"},
            "rule_files": [str(GENERATED / "rules" / "dsagent-slo.yaml")],
            "scrape_configs": [
                {
                    "job_name": "all",
                    "static_configs": [
                        {"targets": [each.removeprefix("http://") for each in (agent, url)]}
                    ],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        command = Path(sys.executable).with_name("dsagent")
        with (folder / "log").open("w") as log:
            children = [
                subprocess.Popen(each, stdout=log, stderr=log)
                for each in (
                    [
                        command,
                        "attach",
                        str(engine.pid),
                        "--prometheus",
                        agent.removeprefix("http://"),
                        "--slo",
                        str(GENERATED.parent / "slo.yaml"),
                    ],
                    [
                        binary,
                        f"--config.file={folder}/prometheus.yml",
                        f"--storage.tsdb.path={folder}/data",
                        f"--web.listen-address={server.removeprefix('http://')}",
                    ],
                )
            ]
        try:
            until(lambda: answers(f"{agent}/metrics"), "the agent shows nothing")
            until(lambda: answers(f"{server}/-/ready"), "prometheus is not ready")
            load = Child(
                "dsagent.agent.load",
                [url, "--model", MODEL, "--duration", "600", "--seed", "1"],
            )
            with load:
                until(lambda: seen(server), "nothing was scraped that can be rated")
                yield Stack(server, f"{agent}/metrics", f"{url}/metrics")
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait(30)


def seen(server: str) -> bool:
    """What comes last in a session under load, and rates of its rarest things."""
    wanted = (
        "dsagent_agent_overhead_ratio",
        "rate(gen_ai_server_time_per_output_token_seconds_count[1m]) > 0",
        "rate(dsagent_kernel_step_delay_seconds_count[1m]) > 0",
        'rate(cache_operation_latency_seconds_count{result="hit"}[1m]) > 0',
    )
    for query in wanted:
        body = answers(f"{server}/api/v1/query?query={urllib.request.quote(query)}")
        if not body or not json.loads(body)["data"]["result"]:
            return False
    return True


def check(*arguments: object) -> tuple[int, dict[str, Any]]:
    ended = subprocess.run(
        [
            Path(sys.executable).with_name("dsagent"),
            *("dashboards", "check", "--json"),
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode in (0, 1), ended.stderr
    return ended.returncode, json.loads(ended.stdout)


BOARDS = sorted(GENERATED.glob("*.json"))
RULES = [*GENERATED.glob("rules/*.yaml"), *GENERATED.glob("grafana/*.yaml")]


@pytest.mark.ebpf
def test_no_panel_is_dead_on_a_real_server(stack: Stack) -> None:
    code, document = check(*BOARDS, *RULES, "--metrics", stack.prometheus)
    assert document["errors"] == []
    assert code == 0
    files = {Path(each["path"]).stem: each for each in document["files"]}
    for name in ("overview", "latency", "causes", "engine", "cache"):
        assert files[f"dsagent-{name}"]["alive"] >= 8, name
    for each in document["files"]:
        for quiet in each["quiet"]:
            assert any(reason in quiet["reason"] for reason in EXPECTED), quiet


@pytest.mark.ebpf
def test_no_panel_is_dead_on_the_pages_themselves(stack: Stack) -> None:
    code, document = check(*BOARDS, "--metrics", stack.agent, "--metrics", stack.engine)
    assert document["errors"] == []
    assert code == 0


@pytest.mark.ebpf
@pytest.mark.parametrize("board", ["dsagent-engine.json", "dsagent-agent.json"])
def test_one_renamed_metric_makes_it_fail(stack: Stack, board: str, tmp_path: Path) -> None:
    text = (GENERATED / board).read_text()
    old = {"dsagent-engine.json": "dsagent_engine_step_part", "dsagent-agent.json": "source_lag"}
    changed = tmp_path / board
    changed.write_text(text.replace(old[board], f"{old[board]}_of_old"))
    code, document = check(changed, "--metrics", stack.prometheus)
    assert code == 1
    assert {error["problem"] for error in document["errors"]} == {"dead"}
    assert any("_of_old" in error["message"] for error in document["errors"])


@pytest.mark.ebpf
def test_what_parses_and_cannot_match_is_found_by_evaluating(stack: Stack, tmp_path: Path) -> None:
    board = tmp_path / "a.json"
    exprs = (
        "dsagent_engine_requests_running / on (instance) cache_request_total",
        "dsagent_engine_requests_running + on (instance) group_left dsagent_source_state",
    )
    panels = [{"title": str(n), "targets": [{"expr": expr}]} for n, expr in enumerate(exprs)]
    board.write_text(json.dumps({"panels": panels}))
    code, document = check(board, "--metrics", stack.prometheus)
    assert code == 1
    messages = [error["message"] for error in document["errors"]]
    assert "they do not match" in messages[0]
    assert "the server refuses it" in messages[1]
