"""The sidecar beside real vLLM, as Kubernetes has them: vLLM's own environment untouched, with the
plug-in on a volume before its eyes, and the sidecar there first.

One story on one sidecar, in the order of this file: a server comes, is asked by OpenAI's client,
loses its engine's core, is started again, and ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from vllm_lab import ROOT, SERVED_AS, VLLM, Server, free_port, one_server_at_a_time, site_packages
from vllm_pod import PodSidecar, inside, require_namespaces

from dsagent.agent.host import procfs
from dsagent.agent.listening import ports

PATIENCE_S = 120.0  # for what must happen; only a failure ever waits so long
RECEIVER = ports.on_loopback(ports.OTLP_HTTP)  # of the pod
FLAGS = ("--load-format", "dummy", "--dtype", "bfloat16")
TRACED = ("--otlp-traces-endpoint", f"http://{RECEIVER}/v1/traces")
# Not gRPC, whose own threads come and go: what is open is counted at the end.
EXPORTS = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
FIRST, STREAMED, AGAIN = (f"{number:032x}" for number in (0xA1, 0xA2, 0xB1))
CALLER = "00f067aa0ba902b7"


@dataclass
class Story:
    sidecar: PodSidecar
    plugin: Path
    folder: Path
    port: int
    before: Counter[str]  # what the sidecar had open with nothing to watch
    servers: list[Server] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)  # of the servers, as the pod numbers them

    def serve(self) -> Server:
        """Started anew with the same command line each time."""
        server = Server(
            *(VLLM, "tiny-deepseek-v2", self.folder, *FLAGS, *TRACED),
            port=self.port,
            under=self.sidecar.under,
            env={"PYTHONPATH": str(self.plugin), **EXPORTS},
        )
        self.servers.append(server)
        server.wait_until_up()
        self.pids.append(inside(self.root))
        return server

    @property
    def root(self) -> int:
        """The newest server's first process, as this test numbers it."""
        return procfs.descendants(self.servers[-1].pid, procfs.parents())[0]

    def named(self, title: str) -> int:
        """One of its processes, by what vLLM calls it."""
        pids = procfs.descendants(self.root, procfs.parents())
        return next(pid for pid in pids if procfs.read_stat(pid).comm.startswith(title))

    def explained(self, trace_id: str) -> dict[str, Any]:
        """By the command, run in the pod; asked again until the request's account is made, and
        vLLM's own span has been joined to it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ran = self.sidecar.dsagent("explain", trace_id, "--json")
            document = json.loads(ran.stdout) if ran.returncode == 0 else {}
            if document.get("engine_span"):
                return dict(document)
            assert time.monotonic() < deadline, ran.stderr or document
            time.sleep(0.2)

    def ask(self, trace_id: str, tokens: int) -> Any:
        with self.client() as client:
            return client.completions.create(**_body(trace_id, tokens))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0
        )

    def open_files(self) -> Counter[str]:
        return opened(self.sidecar.sidecar_pid)


def _body(trace_id: str, tokens: int) -> dict[str, Any]:
    return {
        "model": SERVED_AS,
        "prompt": "Where did the time go?",
        "max_tokens": tokens,
        "extra_body": {"ignore_eos": True},
        "extra_headers": {"traceparent": f"00-{trace_id}-{CALLER}-01"},
    }


def opened(pid: int) -> Counter[str]:
    """What the process has open, by kind, and how many threads it has."""
    kinds: Counter[str] = Counter(threads=len(os.listdir(f"/proc/{pid}/task")))
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kinds[re.sub(r"\d+", "N", os.readlink(entry))] += 1
        except FileNotFoundError:
            continue  # of a connection that has just been answered
    return kinds


def copied_plugin(site: Path, folder: Path) -> Path:
    """The volume that the example's init container fills, by the example's own command."""
    manifest = (ROOT / "deploy/kubernetes/examples/vllm/plugin.yaml").read_text()
    (copying,) = yaml.safe_load(manifest)["spec"]["template"]["spec"]["initContainers"]
    shell, flag, script = copying["command"]
    image = "/opt/dsagent/lib/python3*/site-packages"
    assert image in script
    script = script.replace(image, str(site)).replace("/plugin", str(folder))
    assert os.spawnvp(os.P_WAIT, shell, [shell, flag, script]) == 0
    return folder


@pytest.fixture(scope="module")
def story(plugged: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    require_namespaces()
    folder = tmp_path_factory.mktemp("beside")
    plugin = copied_plugin(site_packages(plugged.overlay.path), tmp_path_factory.mktemp("volume"))
    with (
        one_server_at_a_time(),
        PodSidecar("--otlp-receive", RECEIVER) as sidecar,
        sidecar.network(),
    ):
        sidecar.said("sidecar.started")
        story = Story(sidecar, plugin, folder, free_port(), opened(sidecar.sidecar_pid))
        try:
            yield story
        finally:
            for server in story.servers:
                server.stop()


def test_the_server_is_attached_to_as_it_starts(story: Story) -> None:
    assert json.loads(story.sidecar.page("/readyz")[1])["reasons"] == ["no engine has been found"]
    story.serve()
    story.sidecar.watching(story.pids[0])
    (engine,) = story.sidecar.status()["engines"]
    assert (engine["pid"], engine["kind"], engine["way_in"]) == (story.pids[0], "vllm", "rings")
    assert engine["restarts"] == 0


def test_the_clients_requests_are_explained(story: Story) -> None:
    reply = story.ask(FIRST, 8)
    with story.client() as client:
        body = _body(STREAMED, 12)
        options = {"include_usage": True}
        chunks = list(client.completions.create(**body, stream=True, stream_options=options))
    for trace_id, usage in ((FIRST, reply.usage), (STREAMED, chunks[-1].usage)):
        document = story.explained(trace_id)
        assert document["trace_id"] == trace_id
        assert document["partial"] is False
        assert document["prompt_tokens"] == usage.prompt_tokens
        assert document["output_tokens"] == usage.completion_tokens
        assert document["steps"] >= usage.completion_tokens
        assert document["engine_span"]["name"] == "llm_request"
        figures = {each["figure"]: each for each in document["engine_span"]["figures"]}
        assert figures["gen_ai.usage.completion_tokens"]["engine"] == usage.completion_tokens
        parts_ns = sum(part["ns"] for part in document["parts"])
        assert parts_ns + document["unattributed_ns"] == document["e2e_ns"]
        assert {"decode.compute", "prefill.compute"} <= {p["cause"] for p in document["parts"]}
    told = story.sidecar.dsagent("explain", FIRST).stdout
    assert told.startswith(f"request {story.explained(FIRST)['request_id']}")


def test_its_processes_are_one_engine_until_the_last_of_them_has_ended(story: Story) -> None:
    """Without its core the server gives up by itself; its worker is there for a while longer."""
    (engine,) = story.sidecar.status()["engines"]
    assert (engine["requests"], engine["uncounted_losses"]) == (2, 0)
    worker = story.named("VLLM::Worker")
    os.kill(story.named("VLLM::EngineCor"), signal.SIGKILL)
    story.servers[0].process.wait(PATIENCE_S)
    story.sidecar.said(rf"engine\.ended .*\(pid {story.pids[0]}\); 2 requests")
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline, "its worker has not ended"
        time.sleep(0.1)
    attached = [line for line in story.sidecar.err if "engine.attached" in line]
    assert len(attached) == 1, story.sidecar.err


def test_it_is_followed_through_a_restart(story: Story) -> None:
    story.serve()
    story.sidecar.watching(story.pids[1])
    assert story.ask(AGAIN, 8).usage.completion_tokens == 8
    document = story.explained(AGAIN)
    assert document["partial"] is False
    assert document["output_tokens"] == 8
    for trace_id in (FIRST, STREAMED):  # of before
        assert story.explained(trace_id)["trace_id"] == trace_id
    (engine,) = story.sidecar.status()["engines"]
    assert (engine["pid"], engine["restarts"], engine["engine"]) == (story.pids[1], 1, "0")
    page = story.sidecar.page("/metrics")[1]
    counts = re.findall(r'^dsagent_requests_total\{engine="(\d)",.*\} (\S+)$', page, re.MULTILINE)
    assert [(place, float(count)) for place, count in counts] == [("0", 3.0)]


def test_once_it_has_ended_nothing_of_it_is_left(story: Story) -> None:
    os.kill(story.root, signal.SIGTERM)
    story.sidecar.said(rf"engine\.ended .*\(pid {story.pids[1]}\); 1 request")
    assert story.sidecar.status()["engines"] == []
    deadline = time.monotonic() + PATIENCE_S
    while left := story.open_files() - story.before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert "Traceback" not in "".join(story.sidecar.err)
    os.kill(story.sidecar.sidecar_pid, signal.SIGTERM)
    assert story.sidecar.wait() == 0
