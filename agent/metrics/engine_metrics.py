"""What the reference engine's own /metrics shows, as engine/metrics.py spells it."""

from __future__ import annotations

from dsagent.agent.metrics.metric import Metric

CACHE_HIT = Metric(
    "cache_hit",
    "counter",
    "{block}",
    "Blocks of admitted prompts found in the cache.",
    ("cache_name", "operation"),
)
CACHE_REQUEST = Metric(
    "cache_request",
    "counter",
    "{block}",
    "Blocks of admitted prompts looked for in the cache.",
    ("cache_name", "operation"),
)
CACHE_LATENCY = Metric(
    "cache_operation_latency_seconds",
    "histogram",
    "s",
    "One lookup of a whole prompt; a hit found at least one block.",
    ("cache_name", "result"),
    tuple(0.001 * 2**power for power in range(10)),
)
ENGINE_METRICS = (
    Metric(
        "dsagent_reference_tokens",
        "counter",
        "{token}",
        "Tokens computed as prefill, and tokens generated.",
        ("kind",),
    ),
    Metric(
        "dsagent_reference_requests_finished",
        "counter",
        "{request}",
        "Requests that have ended, by finish reason.",
        ("reason",),
    ),
    Metric(
        "dsagent_reference_preemptions",
        "counter",
        "{request}",
        "Sequences that gave up their KV blocks to be computed again.",
    ),
    Metric(
        "dsagent_reference_step_duration_seconds",
        "histogram",
        "s",
        "One step, from scheduling to handing out its tokens.",
        (),
        (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    ),
    CACHE_HIT,
    CACHE_REQUEST,
    CACHE_LATENCY,
)
