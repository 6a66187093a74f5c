"""Profiles of the real engine under load, taken from outside, and by Pyroscope's own client."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
from pprof_reader import Pushed, ReadSample
from pyroscope_recorder import Recorder, recording
from shell_lab import COMMAND, Agent, Child

PATIENCE_S = 120.0
FORWARD = "Llama.forward"
IN_VAIN = "computes_in_vain"
PYTHON = "process_cpu"
SCRIPT = str(Path(__file__).with_name("profiled_engine.py"))
PPROF_FORMAT = "pprof-format@2.3.2"  # another reader of pprof, in JavaScript


@contextmanager
def engine(*argv: str) -> Iterator[tuple[Child, str]]:
    """The child and its URL, once it serves."""
    with Child(argv) as child:
        yield child, _listening(child).split()[-1]


def _listening(child: Child) -> str:
    """A model takes its time to load where others compute."""
    for _ in range(3):
        with contextlib.suppress(queue.Empty):
            return child.wait_line(lambda line: "listening on" in line)
    raise AssertionError(f"the engine has not served after three minutes: {child.err}")


@contextmanager
def load(url: str, model: str, prompt_words: int) -> Iterator[None]:
    """A client that sends one request after the other until the block ends: no step is of two
    phases. The prompts differ, so that no cache answers them."""
    ending = threading.Event()
    failures: list[str] = []

    def client() -> None:
        count = 0
        while not ending.is_set():
            count += 1
            words = " ".join(str(count * 1000 + n) for n in range(prompt_words))
            body = {"model": model, "prompt": words, "max_tokens": 16, "ignore_eos": True}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    answer.read()
            except OSError as error:
                failures.append(str(error))
                return

    thread = threading.Thread(target=client)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(PATIENCE_S)
    assert not failures


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.2)


def of_kind(kind: str, recorder: Recorder) -> list[Pushed]:
    return [push for push in recorder.read() if push.labels["__name__"] == kind]


def of_loop(pushed: list[Pushed]) -> list[ReadSample]:
    return [
        sample
        for push in pushed
        for sample in push.profile.samples
        if sample.labels.get("thread") == "engine-loop"
    ]


def cpu_ns(samples: list[ReadSample], function: str = "", phase: str = "") -> int:
    return sum(
        sample.values["cpu"]
        for sample in samples
        if (not function or any(name == function for name, _, _ in sample.frames))
        and (not phase or sample.labels.get("phase") == phase)
    )


def profiled(milliseconds: int, recorder: Recorder, runs: int = 2) -> list[ReadSample]:
    """What the loop of a loaded engine with so slow a sampler is seen to do, from outside."""
    argv = (sys.executable, SCRIPT, str(milliseconds), "--model", "smollm2", "--port", "0")
    with engine(*argv) as (child, url), load(url, "smollm2", prompt_words=40):
        flags = ("--pyroscope", recorder.url, "--max-overhead", "50%", "--json")
        with Agent(child.pid, *flags) as agent:
            wait_until(f"{runs} profiles", lambda: len(of_kind(PYTHON, recorder)) >= runs)
            agent.signal(signal.SIGINT)
            assert agent.wait() == 0
            document = agent.document()
    (source,) = (each for each in document["sources"] if each["name"] == "profiles")
    assert (source["state"], source["dropped"]) == ("ok", 0), source
    assert source["cost_ns"] > 0
    (sink,) = (each for each in document["sinks"] if each["name"] == "pyroscope")
    assert sink["acknowledged"] == len(recorder.pushes)
    assert (sink["failed"], sink["dropped"]) == (0, 0)
    return of_loop(of_kind(PYTHON, recorder))


@pytest.mark.smollm2
def test_decode_samples_are_in_forward() -> None:
    with recording() as recorder:
        samples = profiled(0, recorder)
        (first, *_) = of_kind(PYTHON, recorder)
        native = of_kind("native_cpu", recorder)
    assert {"decode", "idle"} & {sample.labels.get("phase") for sample in samples}
    decode_ns = cpu_ns(samples, phase="decode")
    assert decode_ns > 1e9  # of some 20 s
    assert cpu_ns(samples, FORWARD, "decode") > 0.7 * decode_ns
    prefill_ns = cpu_ns(samples, phase="prefill") + cpu_ns(samples, phase="mixed")
    assert prefill_ns > 0.5e9
    # A loop between two steps does not compute the model.
    assert cpu_ns(samples, FORWARD, "idle") < 0.1 * cpu_ns(samples, FORWARD)
    assert first.labels["service_name"] == "reference"
    if os.access("/proc/kcore", os.R_OK):  # root: the kernel's clock may be sampled too
        libraries = {
            frames[0][0]
            for push in native
            for frames, labels in ((each.frames, each.labels) for each in push.profile.samples)
            if labels.get("phase") == "decode"
        }
        assert "libtorch_cpu.so" in libraries
    assert first.profile.duration_ns == pytest.approx(10e9, rel=0.3)


@pytest.mark.smollm2
def test_a_slow_sampler_is_seen_where_it_is() -> None:
    with recording() as recorder:
        samples = profiled(300, recorder)
    decode_ns = cpu_ns(samples, phase="decode")
    assert decode_ns > 1e9
    assert cpu_ns(samples, IN_VAIN, "decode") > 0.25 * decode_ns
    callers = Counter(
        sample.frames[index - 1][0]
        for sample in samples
        for index, (name, _, _) in enumerate(sample.frames)
        if name == IN_VAIN
    )
    assert set(callers) == {"main.<locals>.slow_sample"}


def test_what_is_pushed_is_what_pyroscopes_own_client_pushes() -> None:
    """The real client, in the engine; and ours, of the same engine: the same wire and kinds."""
    with recording() as theirs, recording() as ours:
        argv = (COMMAND, "serve", "--model", "tiny-llama", "--port", "0", "--pyroscope", theirs.url)
        flags = ("--pyroscope", ours.url, "--max-overhead", "50%", "--json")
        with engine(*argv) as (child, url):
            with load(url, "tiny-llama", prompt_words=20), Agent(child.pid, *flags) as agent:
                wait_until("a profile by the agent", lambda: len(of_kind(PYTHON, ours)) >= 1)
                wait_until("a profile by the client", lambda: len(theirs.pushes) >= 1)
                agent.signal(signal.SIGINT)
                assert agent.wait() == 0
            child.signal(signal.SIGTERM)
            assert child.wait() == 0
    (path, headers, _), (our_path, our_headers, _) = theirs.pushes[0], ours.pushes[0]
    assert (path, headers["content-type"]) == (our_path, our_headers["content-type"])
    their_push, our_push = theirs.read()[0], of_kind(PYTHON, ours)[0]
    for label in ("__name__", "service_name"):
        assert their_push.labels[label] == our_push.labels[label], label
    assert their_push.labels["version"] == version("dsagent")
    assert set(their_push.profile.types) <= set(our_push.profile.types)
    assert their_push.profile.period_type == our_push.profile.period_type
    assert their_push.raw[:2] != b"\x1f\x8b"  # the body is compressed, the profile in it is not
    assert len(their_push.id) == len(our_push.id) == 36
    in_phases = {
        sample.labels["phase"]
        for push in theirs.read()
        for sample in push.profile.samples
        if "phase" in sample.labels
    }
    assert in_phases >= {"decode"}, in_phases
    assert in_phases <= {"prefill", "decode", "mixed", "idle"}
    _node_agrees(our_push)


def _node_agrees(pushed: Pushed) -> None:
    """One more reader that is neither ours nor Google's, where npm can fetch it."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("no npm here")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "package.json").write_text("{}")
        command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", PPROF_FORMAT]
        got = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=240
        )
        if got.returncode:
            pytest.skip(f"npm cannot fetch a reader of pprof: {got.stderr.splitlines()[-1:]}")
        Path(folder, "ours.pprof").write_bytes(pushed.raw)
        script = """
            const { Profile } = require('pprof-format');
            const p = Profile.decode(require('fs').readFileSync('ours.pprof'));
            const s = p.stringTable.strings;
            const f = new Map(p.function.map(f => [Number(f.id), s[Number(f.name)]]));
            const of = line => f.get(Number(line.functionId));
            const l = new Map(p.location.map(l => [Number(l.id), of(l.line[0])]));
            console.log(JSON.stringify(p.sample.map(x => [
                x.locationId.map(i => l.get(Number(i))).reverse(), x.value.map(Number),
                Object.fromEntries(x.label.map(y => [s[Number(y.key)], s[Number(y.str)]])) ])));
        """
        ran = subprocess.run(
            [node, "-e", script], cwd=folder, capture_output=True, text=True, check=True, timeout=60
        )
    read = json.loads(ran.stdout)
    assert read == [
        [[name for name, _, _ in sample.frames], list(sample.values.values()), sample.labels]
        for sample in pushed.profile.samples
    ]
