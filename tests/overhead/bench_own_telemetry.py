"""What taking the engine's own spans costs the agent, and counting its experts costs the engine.

Reading a trace request as it comes from vLLM, refusing one that is a bomb, and the routers' hooks
on CPU tensors at DeepSeek-V3's size. A benchmark, not a test.

    python tests/overhead/bench_own_telemetry.py [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from dsagent.agent.sources.otlp_receiver.decode import FIGURES, MAX_FIELDS, decode
from dsagent.agent.sources.otlp_receiver.wire import BadBodyError
from dsagent.instrumentation.layout import Role
from dsagent.instrumentation.ring_lazy import LazyRing
from dsagent.instrumentation.ring_writer import RingWriter
from dsagent.instrumentation.vllm_experts import ExpertWatch

SPANS = 512  # the SDK's largest batch
LAYERS, EXPERTS, CHOSEN, BATCH = 58, 256, 8, 16  # DeepSeek-V3's
STEPS, STEP_S = 1500, 0.02


def median_us(call: Callable[[], Any], times: int) -> float:
    costs_ns = []
    for _ in range(times):
        before_ns = time.perf_counter_ns()
        call()
        costs_ns.append(time.perf_counter_ns() - before_ns)
    return statistics.median(costs_ns) / 1e3


def body() -> bytes:
    """Spans as vLLM makes them: an id, 8 figures, 4 parameters."""
    attributes = [KeyValue(key=key, value=AnyValue(double_value=0.5)) for key in FIGURES]
    attributes.append(KeyValue(key="gen_ai.request.id", value=AnyValue(string_value="cmpl-" * 8)))
    attributes += [
        KeyValue(key=f"gen_ai.request.p{n}", value=AnyValue(int_value=n)) for n in range(4)
    ]
    spans = [
        Span(
            trace_id=n.to_bytes(16, "big"),
            span_id=n.to_bytes(8, "big"),
            name="llm_request",
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=1,
            end_time_unix_nano=2,
            attributes=attributes,
        )
        for n in range(1, SPANS + 1)
    ]
    scope = ScopeSpans(spans=spans)
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[scope])])
    serialised: bytes = request.SerializeToString()
    return serialised


def refuse(bomb: bytes) -> None:
    try:
        decode(bomb)
    except BadBodyError:
        return
    raise AssertionError("a bomb was taken")


class Router:
    global_num_experts = EXPERTS


def hook_us() -> tuple[float, float]:
    """Microseconds that the hooks of all layers add to a step: the median, in which some layer
    keeps its choices, and the 99th percentile, in which some write."""
    ring = LazyRing(lambda: RingWriter(role=Role.RANK, engine_id=1, vllm=True))
    ids = torch.randint(0, EXPERTS, (BATCH, CHOSEN), dtype=torch.int32)

    def original(router: Router) -> tuple[None, Any]:
        return None, ids

    stand_in = ExpertWatch(ring, lambda: (1, 0)).wrap_select(original)
    routers = [Router() for _ in range(LAYERS)]
    costs_ns = []
    for _ in range(STEPS):
        before_ns = time.perf_counter_ns()
        for router in routers:
            original(router)
        between_ns = time.perf_counter_ns()
        for router in routers:
            stand_in(router)
        costs_ns.append(time.perf_counter_ns() - between_ns - (between_ns - before_ns))
        time.sleep(STEP_S)
    ring.close()
    costs_ns.sort()
    return statistics.median(costs_ns) / 1e3, costs_ns[STEPS * 99 // 100] / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    whole, bomb = body(), b"\x0a\x00" * (MAX_FIELDS + 1)
    median, p99 = hook_us()
    results = {
        "reading one of vLLM's spans (µs)": median_us(lambda: decode(whole), 50) / SPANS,
        "refusing the worst bomb (ms)": median_us(lambda: refuse(bomb), 20) / 1e3,
        f"expert hooks, {LAYERS} layers, median of a step (µs)": median,
        f"expert hooks, {LAYERS} layers, 99th percentile (µs)": p99,
    }
    if arguments.json:
        print(json.dumps({"own_telemetry": results}))
        return 0
    for name, value in results.items():
        print(f"{name:<55} {value:>8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
