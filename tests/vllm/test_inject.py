"""Hooks into a running, unmodified vLLM and out again, while it serves.

One story on one server, in the order of this file: it is watched by
`dsagent attach --instrument inject`, asked by `vllm bench serve`, explained,
and restored by `dsagent detach`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from vllm_lab import ENVIRONMENT, MODELS, SERVED_AS, VLLM, Server, one_server_at_a_time

from dsagent.agent.host import procfs
from dsagent.agent.inject.injection import run_inside
from dsagent.agent.inject.memory import mappings

DSAGENT = str(Path(sys.executable).with_name("dsagent"))
PATIENCE_S = 240.0
LONG_PROMPT = "and then " * 300  # more than the 256 tokens of a step

# What a process of the server is, as its own interpreter sees it. Run by the injector itself: what
# that does not leave is tested on other processes.
LOOK = """
import gc, json, sys, threading
hooked = {
    "vllm.v1.core.sched.scheduler": ("Scheduler", ("__init__", "schedule", "update_from_output")),
    "vllm.v1.worker.worker_base": ("WorkerWrapperBase", ("execute_model",)),
    "vllm.v1.worker.gpu_worker": ("Worker", ("execute_model", "sample_tokens")),
    "starlette.applications": ("Starlette", ("__call__",)),
    "vllm.v1.engine.async_llm": ("AsyncLLM", ("add_request",)),
    "vllm.v1.engine.output_processor":
        ("OutputProcessor", ("add_request", "process_outputs", "abort_requests")),
}
ids = []
for module, (owner, names) in hooked.items():
    there = sys.modules.get(module)
    for name in names if there else ():
        ids.append(id(getattr(there, owner).__dict__.get(name)))
REPORT = json.dumps([
    ids, [id(each) for each in sys.meta_path],
    sorted(name for name in sys.modules if "dsagent" in name),
    sorted(name for name in sys.__dict__ if "dsagent" in name),
    sorted(threading._active),
])
"""


@dataclass
class Story:
    server: Server
    folder: Path
    asked: int = 0
    failed: list[str] = field(default_factory=list)
    before: dict[int, Any] = field(default_factory=dict)
    agent: subprocess.Popen[str] | None = None
    quiet: threading.Lock = field(default_factory=threading.Lock)  # nobody else asks
    # Between two moments: vLLM's count of steps with output.
    span_ns: tuple[int, int] = (0, 0)
    their_steps: float = 0

    @property
    def recording(self) -> Path:
        return self.folder / "recording"

    @property
    def pids(self) -> tuple[int, ...]:
        """Those that run vLLM: the front end, the engine, the worker."""
        below = procfs.descendants(self.server.pid, procfs.parents())
        return (
            self.server.pid,
            *(pid for pid in below if procfs.read_stat(pid).comm.startswith("VLLM::")),
        )

    def look(self) -> dict[int, Any]:
        """pid → what its interpreter and /proc show."""
        seen = {}
        for pid in self.pids:
            report = run_inside(pid, LOOK).report
            assert report is not None
            assert report.well, report.message
            seen[pid] = {
                "python": json.loads(report.message),
                "threads": sorted(os.listdir(f"/proc/{pid}/task")),
                "ours": [
                    *(each.path for each in mappings(pid) if "dsagent" in each.path),
                    *_descriptors_of_ours(pid),
                ],
            }
        return seen

    def dsagent(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [DSAGENT, *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )

    def keep_asking(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                with self.quiet:
                    reply = self.server.post("/v1/completions", {"prompt": "One,", "max_tokens": 4})
                if reply["usage"]["completion_tokens"] != 4:
                    self.failed.append(str(reply))
            except Exception as error:  # noqa: BLE001 - any of them is a finding
                self.failed.append(repr(error))
            self.asked += 1
            time.sleep(0.01)  # for whoever wants it to be quiet

    def explain(self, *wanted: str) -> Any:
        ran = self.dsagent("explain", *wanted, "--json", "--pid", str(self.server.pid))
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    def steps_with_output(self) -> float:
        return self.server.metrics()["vllm:iteration_tokens_total_count"]


def _descriptors_of_ours(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            if "dsagent" in (link := os.readlink(f"/proc/{pid}/fd/{name}")):
                found.append(link)
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("injected")
    stop = threading.Event()
    with one_server_at_a_time():
        server = Server(
            VLLM, "smollm2", folder, "--dtype", "float32", "--max-num-batched-tokens", "256"
        )
        story = Story(server, folder)
        asking = threading.Thread(target=story.keep_asking, args=(stop,))
        try:
            server.wait_until_up()
            server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
            asking.start()
            yield story
        finally:
            stop.set()
            if asking.ident is not None:
                asking.join(PATIENCE_S)
            if story.agent is not None:
                story.agent.kill()
                story.agent.wait()
            server.stop()


def test_nothing_of_ours_is_there_at_first(story: Story) -> None:
    story.before = story.look()
    assert len(story.before) >= 3
    for seen in story.before.values():
        assert seen["ours"] == []
        assert seen["python"][2:4] == [[], []]


def test_without_a_yes_nothing_is_put_in(story: Story) -> None:
    ran = story.dsagent("attach", str(story.server.pid), "--instrument", "inject")
    assert ran.returncode == 2
    lines = ran.stderr.splitlines()
    assert sum("will pause for about" in line for line in lines) == len(story.pids)
    assert lines[-1] == "dsagent: cannot inject: nobody has agreed; --yes does"
    assert story.look() == story.before


def test_it_is_put_in_while_the_server_serves(story: Story) -> None:
    errors = story.folder / "agent.err"
    argv = [DSAGENT, "attach", str(story.pids[-1]), "--instrument", "inject", "--yes", "--json"]
    with errors.open("w") as file:
        story.agent = subprocess.Popen(
            [*argv, "--record", str(story.recording)],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    until(lambda: "attached to" in errors.read_text(), "attached")
    lines = errors.read_text().splitlines()
    assert sum("will pause for about" in line for line in lines) == len(story.pids)
    assert sum("hooks; paused" in line for line in lines) == len(story.pids)
    hooked = story.look()
    for pid, seen in hooked.items():
        assert seen["ours"]  # its ring
        assert seen["python"][0] != story.before[pid]["python"][0]
        assert seen["python"][3] == ["dsagent.injected"]


def test_the_clients_requests_are_explained(story: Story) -> None:
    with story.quiet:
        begun_ns, steps = time.monotonic_ns(), story.steps_with_output()
        reply = story.server.post("/v1/completions", {"prompt": LONG_PROMPT, "max_tokens": 6})
        bench = subprocess.run(
            [
                *(str(VLLM / "bin" / "vllm"), "bench", "serve", "--backend", "openai"),
                *("--base-url", f"http://127.0.0.1:{story.server.port}", "--model", SERVED_AS),
                *("--tokenizer", str(MODELS / "smollm2"), "--dataset-name", "random"),
                *("--random-input-len", "40", "--random-output-len", "12", "--num-prompts", "6"),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            cwd=story.folder,
            env={**os.environ, **ENVIRONMENT},
        )
        assert bench.returncode == 0, bench.stderr[-3000:]
        assert "Successful requests:                     6" in bench.stdout
        story.span_ns = begun_ns, time.monotonic_ns()
        story.their_steps = story.steps_with_output() - steps
    assert reply["usage"]["prompt_tokens"] > 512
    long = story.explain(reply["id"])
    assert long["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    assert long["output_tokens"] == 6
    assert long["steps"] >= 3 + 5  # the prompt alone takes three
    slowest = story.explain()
    ids = [slowest["request_id"], *(other["request_id"] for other in slowest["others"])]
    accounts = [story.explain(each) for each in ids[:6]]
    benched = [account for account in accounts if account["output_tokens"] == 12]
    assert benched, accounts
    for account in benched:
        parts_ns = sum(part["ns"] for part in account["parts"])
        assert parts_ns + account["unattributed_ns"] == account["e2e_ns"]
        assert account["parts"]
        assert not account["partial"]


def test_detach_restores_everything_and_ends_the_agent(story: Story) -> None:
    assert story.agent is not None
    hooked = story.look()
    detached = story.dsagent("detach", str(story.server.pid), "--json")
    assert detached.returncode == 0, detached.stderr
    document = json.loads(detached.stdout)
    assert document["agent_ended"]
    assert [each["pid"] for each in document["processes"]] == [
        story.pids[0],
        *reversed(story.pids[1:]),
    ]
    assert all(each["done"].endswith(" hooks") for each in document["processes"])
    out, _ = story.agent.communicate(timeout=PATIENCE_S)
    assert story.agent.returncode == 0
    summary = json.loads(out)
    assert summary["uncounted_losses"] == 0
    assert summary["engine"] == "vllm"
    assert summary["requests"] >= 7
    for pid, seen in story.look().items():
        before = story.before[pid]
        assert seen["ours"] == []
        assert seen["python"][:4] == before["python"][:4]  # the same objects
        assert set(seen["threads"]) <= {*hooked[pid]["threads"], *before["threads"]}
    assert story.dsagent("detach", str(story.server.pid)).returncode == 2  # nothing more


def rows_of(story: Story, table: str) -> list[dict[str, Any]]:
    return [
        row
        for path in sorted(story.recording.glob(f"{table}-*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def test_the_steps_are_exact(story: Story) -> None:
    """Each of a request's tokens lies in a step of the recording; and the steps with output are
    as many as vLLM counts, which has none for those that only computed a chunk."""
    rows = rows_of(story, "shares")
    whole = [
        row
        for row in rows_of(story, "requests")
        if not row["partial"] and row["finish_reason"] == "length"
    ]
    assert {row["output_tokens"] for row in whole} >= {4, 6, 12}
    for request in whole:
        shares = [row for row in rows if row["request_key"] == request["request_key"]]
        assert sum(row["output_tokens"] for row in shares) == request["output_tokens"]
        computed = sum(row["scheduled_tokens"] for row in shares)
        assert computed + request["cached_tokens"] == (
            request["prompt_tokens"] + request["output_tokens"] - 1
        )
    begun_ns, ended_ns = story.span_ns
    inside = {
        row["step_id"]
        for row in rows_of(story, "steps")
        if begun_ns <= row["start_ns"] and row["end_ns"] <= ended_ns
    }
    with_output = {row["step_id"] for row in rows if row["output_tokens"]} & inside
    assert len(with_output) == story.their_steps
    assert inside - with_output  # the chunks


def test_the_server_served_throughout(story: Story) -> None:
    asked = story.asked
    until(lambda: story.asked > asked + 1, "it still serves")
    assert story.failed == []
    assert "Traceback" not in story.server.tail()
