"""What attaching costs: time to the first account, the agent's own CPU and memory, and how much
slower the engine's steps get.

The slowdown is the difference of mean step time over interleaved blocks, agent on and agent off,
on one engine with a batch that stays the same; it runs until the 95 % half-width is 0.5 % or the
time is over (then it is not resolved, which is no pass).

    python tests/overhead/bench_attach.py [--budget-s 120] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening.control import ask
from dsagent.instrumentation.records import Step
from dsagent.instrumentation.ring import RingReader, find_rings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "accuracy"))
from lab import DSAGENT, Engine, engine, wait_for_line
from load import send, text

BLOCK_S = 6.0
SETTLE_S = 1.0
HALF_WIDTH = 0.005
STREAMS = 4

PACED = Path(__file__).with_name("paced_engine.py")


@contextmanager
def attached(pid: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [str(DSAGENT), "attach", str(pid), "--json", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_for_line(process, "attached to")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def first_account(target: Engine, repeats: int) -> dict[str, Any]:
    """From starting the command to the first account of a request that ended after attaching,
    less the wait for it to end."""
    dice = random.Random(3)
    attach_s, account_s = [], []
    for _ in range(repeats):
        began = time.monotonic()
        with attached(target.pid):
            attach_s.append(time.monotonic() - began)
            sent = send(target, text(dice, 5), 4, dice)
            ended = time.monotonic()
            while True:
                try:
                    ask(target.pid, {"op": "explain", "id": sent.trace_id, "by": "e2e"})
                    break
                except DsagentError:
                    if time.monotonic() - ended > 10:
                        raise
                    time.sleep(0.01)
            account_s.append(time.monotonic() - ended)
    totals = [a + b for a, b in zip(attach_s, account_s, strict=True)]
    return {
        "attach_s_p50": statistics.median(attach_s),
        "account_s_p50": statistics.median(account_s),
        "first_account_s_p50": statistics.median(totals),
        "first_account_s_max": max(totals),
    }


def own_cost(seconds: float) -> dict[str, Any]:
    """The agent on 50 steps a second of batch 16 (a paced writer of real records), with all that
    `attach` can write."""
    with (
        subprocess.Popen([sys.executable, str(PACED)], stderr=subprocess.PIPE, text=True) as paced,
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory() as another,
    ):
        try:
            wait_for_line(paced, "pacing")
            found = {}
            for name, flags in (
                ("bare", []),
                ("recording", ["--record", directory]),
                ("prometheus", ["--prometheus", "127.0.0.1:0"]),
                ("both", ["--record", another, "--prometheus", "127.0.0.1:0"]),
            ):
                with attached(paced.pid, *flags) as process:
                    time.sleep(seconds)
                    process.send_signal(signal.SIGTERM)
                    assert process.stdout is not None
                    overhead = json.loads(process.stdout.read())["overhead"]
                found[name] = {
                    "agent_cpu_ratio": overhead["agent_cpu_ratio"],
                    "agent_pss_bytes": overhead["agent_pss_bytes"],
                }
            return found
        finally:
            paced.kill()


class Steps:
    """The engine's own record of its steps, read beside the agent."""

    def __init__(self, pid: int) -> None:
        self._readers = [RingReader.open(candidate) for candidate in find_rings(pid)]

    def take(self) -> list[Step]:
        return [
            record
            for reader in self._readers
            for record in reader.read(max_records=100_000)
            if isinstance(record, Step)
        ]

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def mean_step_ns(steps: list[Step]) -> float:
    """Of the decode steps of the full batch: period from output to output."""
    full = [
        (after.end_ns - before.end_ns)
        for before, after in itertools.pairwise(steps)
        if after.step_id == before.step_id + 1
        and before.prefill_tokens == after.prefill_tokens == 0
        and before.decode_tokens == after.decode_tokens == STREAMS
    ]
    return statistics.fmean(full) if len(full) >= 20 else math.nan


def slowdown(
    target: Engine,
    budget_s: float,
    watched: Callable[[int], AbstractContextManager[Any]] = attached,
) -> dict[str, Any]:
    """The steps' mean time with the agent, or whatever watches, over without it, pair by pair."""
    stop = threading.Event()

    def stream(seed: int) -> None:
        dice = random.Random(seed)
        while not stop.is_set():
            send(target, text(dice, 8), 400, dice)

    streams = [threading.Thread(target=stream, args=(i,), daemon=True) for i in range(STREAMS)]
    for each in streams:
        each.start()
    reader = Steps(target.pid)
    ratios: list[float] = []
    half_width = math.inf
    deadline = time.monotonic() + budget_s

    def block() -> float:
        time.sleep(SETTLE_S)
        reader.take()
        time.sleep(BLOCK_S)
        return mean_step_ns(reader.take())

    try:
        while time.monotonic() < deadline and half_width > HALF_WIDTH:
            off_ns = block()
            with watched(target.pid):
                on_ns = block()
            if not math.isnan(on_ns / off_ns):
                ratios.append(on_ns / off_ns - 1)
            if len(ratios) >= 4:
                half_width = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
            print(f"  pair {len(ratios)}: half-width {half_width:.4f}", file=sys.stderr)
    finally:
        stop.set()
        reader.close()
    return {
        "pairs": len(ratios),
        "slowdown_ratio": statistics.fmean(ratios) if ratios else None,
        "half_width_ratio": half_width if math.isfinite(half_width) else None,
        "resolved": half_width <= HALF_WIDTH,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--budget-s", type=float, default=120.0, help="for the slowdown")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with engine("tiny-llama") as target:
        first = first_account(target, 5)
    cost = own_cost(15.0)
    with engine("smollm2") as target:
        slower = slowdown(target, options.budget_s)
    if options.json:
        print(json.dumps({"first_account": first, "own_cost": cost, "slowdown": slower}))
        return
    print(
        f"attach to first account: {first['first_account_s_p50']:.2f} s "
        f"(most {first['first_account_s_max']:.2f}), of which attaching "
        f"{first['attach_s_p50']:.2f} s; the bar is 2 s"
    )
    for name, each in cost.items():
        print(
            f"agent, {name}, 50 steps/s of batch 16: {each['agent_cpu_ratio']:.1%} of one core, "
            f"{each['agent_pss_bytes'] / 1e6:.0f} MB PSS; the bars are 5 % and 120 MB"
        )
    if slower["slowdown_ratio"] is None or slower["half_width_ratio"] is None:
        print("slowdown: too few steps")
        return
    print(
        f"slowdown of the engine's steps: {slower['slowdown_ratio']:+.2%} "
        f"± {slower['half_width_ratio']:.2%} ({slower['pairs']} pairs of blocks"
        f"{'' if slower['resolved'] else '; not resolved to ± 0.5 %'}); the bar is 1 %"
    )


if __name__ == "__main__":
    main()
