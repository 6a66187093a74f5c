"""The main job as one path: a real model served, attached to, a request sent by the official
client, explained by its trace id, its spans at an independent receiver, its exemplar in a real
Prometheus; and the agent killed under load.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from lab import DSAGENT, Engine, engine, wait_for_line
from load import Load
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

pytestmark = [pytest.mark.ebpf, pytest.mark.smollm2]

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def target() -> Iterator[Engine]:
    with engine("smollm2") as served:
        yield served


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def attach(target: Engine, *flags: str) -> subprocess.Popen[str]:
    agent = subprocess.Popen(
        [str(DSAGENT), "attach", str(target.pid), "--json", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_line(agent, "attached to")
    return agent


def end(agent: subprocess.Popen[str], how: signal.Signals) -> str:
    agent.send_signal(how)
    output, _ = agent.communicate(timeout=30)
    return output


def chat(target: Engine, prompt: str) -> str:
    client = openai.OpenAI(base_url=f"http://{target.host}:{target.port}/v1", api_key="none")
    with client:
        stream = client.chat.completions.create(
            model=target.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=12,
            temperature=0,
            stream=True,
            extra_headers={"traceparent": TRACEPARENT},
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def explain(target: Engine, wanted: str) -> dict[str, Any]:
    """What the command prints; asked again until the agent has the request's account."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        asked = subprocess.run(
            [str(DSAGENT), "explain", wanted, "--pid", str(target.pid), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode == 0:
            document: dict[str, Any] = json.loads(asked.stdout)
            if document["finished"]:
                return document
        assert time.monotonic() < deadline, asked.stderr
        time.sleep(0.2)


def prometheus(folder: Path, scraped: str) -> tuple[subprocess.Popen[bytes], str]:
    binary = shutil.which("prometheus")
    assert binary is not None, "no prometheus here: make setup installs it"
    address = f"127.0.0.1:{free_port()}"
    (folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [
                    {"job_name": "dsagent", "static_configs": [{"targets": [scraped]}]}
                ],
            }
        )
    )
    process = subprocess.Popen(
        [
            binary,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
            "--enable-feature=exemplar-storage",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return process, address


def exemplar_trace_ids(address: str) -> set[str]:
    query = urllib.parse.urlencode(
        {
            "query": "gen_ai_server_time_to_first_token_seconds_bucket",
            "start": str(time.time() - 600),
            "end": str(time.time() + 60),
        }
    )
    try:
        with urllib.request.urlopen(
            f"http://{address}/api/v1/query_exemplars?{query}", timeout=5
        ) as response:
            series = json.load(response)["data"]
    except OSError:
        return set()
    return {
        exemplar["labels"].get("trace_id", "") for each in series for exemplar in each["exemplars"]
    }


def test_one_request_from_the_client_to_every_place_it_is_looked_for(
    target: Engine, tmp_path: Path
) -> None:
    async def run() -> tuple[str, dict[str, Any], list[Span], str]:
        otlp, scrape = free_port(), f"127.0.0.1:{free_port()}"
        trace_id = bytes.fromhex(TRACE_ID)
        async with OtelTapHttpProtobufReceiver(OtelTapHttpProtobufReceiverSettings(otlp)) as tap:
            agent = await asyncio.to_thread(
                attach,
                target,
                "--otlp-endpoint",
                f"http://127.0.0.1:{otlp}",
                "--prometheus",
                scrape,
            )
            server, address = prometheus(tmp_path, scrape)
            try:
                waits = asyncio.gather(
                    tap.await_trace(lambda s: s.trace_id == trace_id and s.kind == 2, DEADLINE_S),
                    tap.await_trace(
                        lambda s: (
                            any(link.trace_id == trace_id for link in s.links)
                            and s.trace_id != trace_id
                        ),
                        DEADLINE_S,
                    ),
                )
                text = await asyncio.to_thread(chat, target, "What is the capital of France?")
                document = await asyncio.to_thread(explain, target, TRACE_ID)
                spans = await waits
                deadline = time.monotonic() + DEADLINE_S
                while TRACE_ID not in await asyncio.to_thread(exemplar_trace_ids, address):
                    assert time.monotonic() < deadline, "no exemplar came to Prometheus"
                    await asyncio.sleep(0.5)
                output = await asyncio.to_thread(end, agent, signal.SIGTERM)
            finally:
                server.terminate()
                server.wait(10)
                if agent.poll() is None:
                    agent.kill()
                    agent.communicate()
            return text, document, list(spans), output

    text, document, (request, step), output = asyncio.run(run())
    assert "Paris" in text
    assert document["trace_id"] == TRACE_ID
    assert document["output_tokens"] > 1
    spent = sum(part["ns"] for part in document["parts"])
    assert spent + document["unattributed_ns"] == document["e2e_ns"]
    first = sum(part["ns"] for part in document["ttft_parts"])
    assert first + document["ttft_unattributed_ns"] == document["ttft_ns"]
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    expected = {f"dsagent.part.{part['cause']}_ns": part["ns"] for part in document["parts"]}
    expected["dsagent.part.unattributed_ns"] = document["unattributed_ns"]
    given = {a.key: a.value.int_value for a in request.attributes}
    assert {key: ns for key, ns in given.items() if key.startswith("dsagent.part.")} == expected
    assert step.name == "engine step"
    summary = json.loads(output)
    assert summary["uncounted_losses"] == 0
    for sink in summary["sinks"]:
        assert sink["failed"] == sink["dropped"] == 0, sink


def programs_in_the_kernel() -> set[int]:
    shown = subprocess.run(
        ["bpftool", "-j", "prog"], capture_output=True, text=True, check=True
    ).stdout
    return {program["id"] for program in json.loads(shown)}


def programs_held_by(pid: int) -> set[int]:
    """Ids of the BPF programs behind its descriptors: others' agents have theirs."""
    held: set[int] = set()
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        held |= {int(found) for found in re.findall(r"^prog_id:\s+(\d+)$", info.read_text(), re.M)}
    return held


def test_an_agent_killed_under_load_leaves_nothing_and_the_engine_serves_on(
    target: Engine,
) -> None:
    with Load(target, clients=2, max_tokens=(4, 8), seed=5) as load:
        agent = attach(target)
        load.wait_for(2)
        its_own = programs_held_by(agent.pid)
        assert its_own, "it had no probes to leave"
        end(agent, signal.SIGKILL)
        load.wait_for(4)
    assert not [sent.error for sent in load.sent if sent.error]
    deadline = time.monotonic() + DEADLINE_S
    while its_own & programs_in_the_kernel():  # the kernel frees them after the last fd is closed
        assert time.monotonic() < deadline, its_own & programs_in_the_kernel()
        time.sleep(0.1)
    assert f"@dsagent/{target.pid}" not in Path("/proc/net/unix").read_text()


def test_the_demo_does_what_its_issue_says() -> None:
    shown = subprocess.run(
        [str(DSAGENT), "demo", "--json", "--duration", "20"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert document["requests"] >= 20
    states = {source["name"]: source["state"] for source in document["sources"]}
    assert states["steps"] == states["kernel"] == "ok", document["sources"]
    assert document["uncounted_losses"] == 0
    assert document["explained"]
    for explained in document["explained"]:
        spent = sum(part["ns"] for part in explained["parts"])
        assert spent + explained["unattributed_ns"] == explained["e2e_ns"]
    assert document["unattributed_ratio_p50"] <= 0.05
