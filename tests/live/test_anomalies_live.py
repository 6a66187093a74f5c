"""A real engine with real faults, and what the agent's watch for anomalies tells of them: a sampler
that got slow, and a process that takes the CPU."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening.control import ask
from dsagent.instrumentation import names

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "accuracy"))
from faults.cpu import run_hogs
from lab import Engine, agent, engine
from load import Load
from otlp_back_ends import Received, grpc_back_end

pytestmark = pytest.mark.ebpf

HOGS = 3
NICENESS = -10  # outweighs whatever else a machine is busy with, the agent too for a while
PATIENCE_S = 90.0  # for what must happen; only a failure ever waits so long
# What grows for want of a CPU: steps; or, where next to none is done, what requests waited for.
HOGGED = (names.STEP_FORWARD_NS, "dsagent.step.duration_ns", names.part("cpu.runqueue"))
Found = dict[str, Any]


def anomalies(target: Engine) -> list[Found]:
    found: list[Found] = ask(target.pid, {"op": "why"})["anomalies"]
    return found


def look_for(
    target: Engine, wanted: Callable[[Found], bool], patience_s: float
) -> tuple[Found | None, list[Found]]:
    """What is wanted, None where it does not come in time, and all there is."""
    deadline = time.monotonic() + patience_s
    found: list[Found] = []
    while time.monotonic() < deadline:
        with suppress(DsagentError):  # it had no CPU to answer
            found = anomalies(target)
        if told := next(filter(wanted, found), None):
            return told, found
        time.sleep(0.2)
    return None, found


def wait_for(target: Engine, wanted: Callable[[Found], bool], what: str) -> Found:
    told, found = look_for(target, wanted, PATIENCE_S)
    assert told, f"{what} was not found; only {found}"
    return told


def test_a_slow_sampler_and_a_cpu_hog_are_found_and_named(tmp_path: Path) -> None:
    with grpc_back_end() as received, engine("tiny-llama") as target:
        flags = ("--anomalies", "--otlp-protocol", "grpc")
        flags += ("--otlp-endpoint", f"http://127.0.0.1:{received.port}")
        with (
            Load(target, clients=2, max_tokens=(24, 40), seed=5) as load,
            agent(target.pid, tmp_path / "recording", *flags) as observed,
        ):
            load.wait_for(150)
            print(f"without a fault: {len(anomalies(target))} findings in 150 requests")
            sampler, hog = inject(target, load)
    sent = {each.trace_id for each in load.sent}
    for found in (sampler, hog):
        assert found["value"] > 1.1 * found["usual"]
        assert found["trace_ids"]
        assert set(found["trace_ids"]) <= sent
    assert sampler["value"] > 20e6 > sampler["usual"] > 0  # it slept for 30 ms
    kept = observed.summary["anomalies"]
    assert (sampler["feature"], sampler["begun_ns"]) in [
        (k["feature"], k["begun_ns"]) for k in kept
    ]
    assert_exported(received, sampler)
    assert_recorded(tmp_path / "recording", sampler)


def inject(target: Engine, load: Load) -> tuple[Found, Found]:
    since_ns = time.monotonic_ns()
    fault = threading.Thread(
        target=target.fault,
        args=("sampler",),
        kwargs={"amount": 0.03, "calls": 150, "limit_s": 30},
    )
    fault.start()
    sampler = wait_for(
        target,
        lambda each: each["feature"] == names.STEP_SAMPLE_NS and each["begun_ns"] >= since_ns,
        "the sampler",
    )
    fault.join(60)
    wait_for(
        target,
        lambda each: each["begun_ns"] == sampler["begun_ns"] and each["state"] == "ended",
        "the end of it",
    )
    return sampler, found_hog(target, load)


def found_hog(target: Engine, load: Load) -> Found:
    """Where others use the machine as well, it may take more than one to tell it from them."""
    found: list[Found] = []
    for _ in range(HOGS):
        load.wait_for(60)  # it rests for a while after an episode
        since_ns = time.monotonic_ns()
        run_hogs(os.sched_getaffinity(target.pid), 6.0, NICENESS)

        def is_hog(each: Found, since_ns: int = since_ns) -> bool:
            return each["feature"] in HOGGED and each["begun_ns"] >= since_ns

        told, found = look_for(target, is_hog, PATIENCE_S / HOGS)
        if told:
            return told
    raise AssertionError(f"none of {HOGS} hogs was found; only {found}")


def assert_exported(received: Received, found: Found) -> None:
    lines = [log for log in received.logs if log.event_name == "dsagent.anomaly.begun"]
    traces = {log.trace_id.hex() for log in lines}
    assert found["trace_ids"][0] in traces
    counted = [
        point
        for metric in received.metrics
        if metric.name == "dsagent.anomaly.findings"
        for point in metric.sum.data_points
        if any(a.value.string_value == found["feature"] for a in point.attributes)
    ]
    assert counted
    assert max(point.as_double or point.as_int for point in counted) >= 1


def assert_recorded(folder: Path, found: Found) -> None:
    rows = [
        row
        for path in sorted(folder.glob("statuses-*.parquet"))
        for row in pyarrow.parquet.read_table(path).to_pylist()
        if row["name"] == "anomaly.begun"
    ]
    attributes = [dict(row["attributes"]) for row in rows]
    told = [each for each in attributes if each["dsagent.anomaly.feature"] == found["feature"]]
    assert told, json.dumps(attributes)
    assert told[0]["trace_ids"].split() == found["trace_ids"]
