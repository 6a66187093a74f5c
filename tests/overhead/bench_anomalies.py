"""The watch for anomalies: what a step, a request and the whole watch cost, and how often it finds
something where nothing was done.

The costs are those of made-up steps and requests. The run without a fault is of a real engine under
a steady load; what else runs on the machine is what it is.

    python tests/overhead/bench_anomalies.py [--seconds 60] [--json]
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "accuracy"))

from bench_attach import PACED, attached
from lab import engine, wait_for_line
from load import Load

from dsagent.agent.anomalies.watch import AnomalyWatch
from dsagent.agent.attribution.account import Account
from dsagent.instrumentation.records import Step

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

from made import account, step

STEPS, REQUESTS = 50_000, 5_000
PACED_S = 20.0
PROBE = """
import time
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
import dsagent.agent.session.loop
before, began = resident(), time.perf_counter()
from dsagent.agent.anomalies.make import make_watch
make_watch()
print(resident() - before, time.perf_counter() - began)
"""


def microseconds() -> dict[str, float]:
    """CPU of one step of batch 16, and of one request, once the watch is warm."""
    watch = AnomalyWatch()
    names = tuple(f"r{number}" for number in range(16))
    base = step(1, names)
    steps = [
        replace(base, step_id=number, start_ns=base.start_ns + number * 20_000_000,
                end_ns=base.end_ns + number * 20_000_000 + number * 7919 % 1_000_000)
        for number in range(STEPS)
    ]  # fmt: skip
    one = account()
    requests = [
        replace(one, record=replace(one.record, request_key=number, request_id=f"r{number}"))
        for number in range(REQUESTS)
    ]
    return {
        "step_us": _cpu_us(watch, steps, ()) / len(steps),
        "request_us": _cpu_us(watch, (), requests) / len(requests),
    }


def _cpu_us(watch: AnomalyWatch, steps: Any, accounts: Any) -> float:
    """Of all of them, ten at a time."""
    began_ns = time.process_time_ns()
    for at in range(0, max(len(steps), len(accounts)), 10):
        few: list[Step] = list(steps[at : at + 10])
        ended: list[Account] = list(accounts[at : at + 10])
        watch.look((), few, ended, few[-1].end_ns if few else ended[-1].record.sent_ns)
    return (time.process_time_ns() - began_ns) / 1e3


def loading() -> dict[str, float]:
    """What importing it adds to an agent, in a process of its own."""
    told = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    ).stdout.split()
    return {"resident_bytes": float(told[0]), "import_s": float(told[1])}


def of_agent(pid: int, seconds: float, *flags: str) -> dict[str, Any]:
    """The summary of an agent that watches so long."""
    with attached(pid, *flags) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        summary: dict[str, Any] = json.loads(process.stdout.read())
    return summary


def whole(seconds: float) -> dict[str, Any]:
    """The agent on 50 steps a second of batch 16, with and without it."""
    with subprocess.Popen([sys.executable, str(PACED)], stderr=subprocess.PIPE, text=True) as paced:
        try:
            wait_for_line(paced, "pacing")
            return {
                name: of_agent(paced.pid, seconds, *flags)["overhead"]
                for name, flags in (("bare", ()), ("anomalies", ("--anomalies",)))
            }
        finally:
            paced.kill()


def without_fault(seconds: float) -> dict[str, Any]:
    """A real engine, the real agent, a steady load, and nothing done to either."""
    with engine("tiny-llama") as target, Load(target, clients=2, max_tokens=(24, 40), seed=11):
        summary = of_agent(target.pid, seconds, "--anomalies")
    return {
        "seconds": seconds,
        "steps": summary["steps"],
        "requests": summary["requests"],
        "findings": [
            {key: each[key] for key in ("kind", "feature", "value", "usual", "lasted_ns")}
            for each in summary["anomalies"]
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of the run without a fault")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    found: dict[str, Any] = {**microseconds(), **loading(), "agent": whole(PACED_S)}
    found["no_fault"] = without_fault(arguments.seconds)
    if arguments.json:
        print(json.dumps({"anomalies": found}))
        return 0
    ratio = (50 * found["step_us"] + 8 * found["request_us"]) / 1e6
    print(
        f"a step of batch 16 {found['step_us']:.1f} µs, a request {found['request_us']:.1f} µs; at "
        f"50 steps and 8 requests a second {ratio:.2%} of one core"
    )
    print(
        f"importing it: {found['resident_bytes'] / 1e6:.0f} MB resident more, "
        f"{found['import_s'] * 1e3:.0f} ms"
    )
    for name, cost in found["agent"].items():
        print(
            f"agent, {name}, 50 steps/s of batch 16: {cost['agent_cpu_ratio']:.1%} of one core, "
            f"{cost['agent_pss_bytes'] / 1e6:.0f} MB PSS; the bars are 5 % and 120 MB"
        )
    calm = found["no_fault"]
    print(
        f"no fault: {calm['seconds']:.0f} s, {calm['steps']:,} steps, {calm['requests']} requests: "
        f"{len(calm['findings'])} findings"
    )
    for each in calm["findings"]:
        print(
            f"  {each['feature']} of {each['kind']}s: {each['value'] / 1e6:.2f} ms, usually "
            f"{each['usual'] / 1e6:.2f} ms, for {each['lasted_ns'] / 1e9:.1f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
