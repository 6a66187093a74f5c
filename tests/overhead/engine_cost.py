"""What the kernel source costs on a real engine that decodes for four clients: program by program,
as the kernel times them, and in all, as the agent says itself."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsagent.agent.facts import Target
from dsagent.agent.probes import OBJECTS, Tier
from dsagent.agent.sources.bpf.libbpf import Library
from dsagent.agent.sources.bpf.loader import Loaded
from dsagent.agent.sources.kernel import KernelSource
from dsagent.agent.sources.steps import StepsSource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "accuracy"))
from lab import DSAGENT, Engine, engine, wait_for_line
from load import send, text

STREAMS = 4
WINDOW_S = 5.0
ATTACHED_S = 24.0  # four windows of the agent's overhead meter
POLL_S = 0.2


@contextmanager
def busy(model: str) -> Iterator[Engine]:
    """An engine, and clients that keep its batch full."""
    stop = threading.Event()

    def stream(target: Engine, seed: int) -> None:
        dice = random.Random(seed)
        while not stop.is_set():
            send(target, text(dice, 8), 200, dice)

    with engine(model) as target:
        streams = [threading.Thread(target=stream, args=(target, n)) for n in range(STREAMS)]
        for each in streams:
            each.start()
        try:
            time.sleep(2.0)
            yield target
        finally:
            stop.set()
            for each in streams:
                each.join()


def _runs(loaded: Loaded) -> dict[str, tuple[int, int]]:
    names = [program.name for group in OBJECTS.values() for program in group]
    return {name: loaded.runs(name) for name in names if name not in loaded.missing}


def by_program(target: Engine, tier: Tier) -> dict[str, Any]:
    """Runs a second and nanoseconds a run of each program, as the kernel times them (which itself
    takes some 50 ns); what they take in all, so timed and by our own account."""
    watched = Target(target.pid, 0, 0, "bench", (), "reference")
    steps = StepsSource(watched)
    steps.start()
    source = KernelSource(watched, steps.new_step_words(), tier=tier)
    source.start()
    try:
        assert source.loaded is not None

        def window() -> tuple[float, float, int]:
            """Seconds, CPU seconds of the programs by our own account, steps."""
            began, cost_ns, poll_ns, ran = time.monotonic(), source.status().cost_ns, 0, 0
            while time.monotonic() < began + WINDOW_S:
                time.sleep(POLL_S)
                ran += len(steps.poll(time.monotonic_ns()).steps)
                poll_ns -= time.thread_time_ns()
                source.poll(time.monotonic_ns())
                poll_ns += time.thread_time_ns()
            own_s = (source.status().cost_ns - cost_ns - poll_ns) / 1e9
            return time.monotonic() - began, own_s, ran

        seconds, own_s, ran = window()
        stats_fd = Library().enable_run_stats()
        assert stats_fd is not None
        try:
            before = _runs(source.loaded)
            timed_s, _, _ = window()
            after = _runs(source.loaded)
        finally:
            os.close(stats_fd)
    finally:
        source.stop()
        steps.stop()
    cpus = len(os.sched_getaffinity(target.pid))
    programs = {
        name: {
            "runs_per_s": round((after[name][0] - runs) / timed_s, 1),
            "ns_a_run": round((after[name][1] - ns) / (after[name][0] - runs)),
        }
        for name, (runs, ns) in before.items()
        if after[name][0] > runs
    }
    timed_ns = sum(after[name][1] - ns for name, (_, ns) in before.items())
    return {
        "steps_per_s": round(ran / seconds, 1),
        "own_ratio": own_s / seconds / cpus,
        "timed_ratio": timed_ns / 1e9 / timed_s / cpus,
        "programs": programs,
    }


def by_agent(target: Engine) -> dict[str, Any]:
    """`dsagent attach` with its usual limit: the overhead it says, and what became of the tier."""
    command = [str(DSAGENT), "attach", str(target.pid), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for_line(process, "attached to")
        time.sleep(ATTACHED_S)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        document = json.loads(process.stdout.read())
    kernel = next(source for source in document["sources"] if source["name"] == "kernel")
    return {
        "overhead_ratio": document["overhead"]["ratio"],
        "kernel": kernel["state"],
        "reason": kernel["reason"],
        "dropped": kernel["dropped"],
    }


def of_engine(model: str) -> dict[str, Any]:
    with busy(model) as target:
        return {
            "default": by_program(target, "default"),
            "core": by_program(target, "core"),
            "attach": by_agent(target),
        }
