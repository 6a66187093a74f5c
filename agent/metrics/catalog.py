"""Every metric that the agent or its reference engine emits: the one place where it is spelled.

Exporters, documents, boards, alerts and tests read `CATALOGUE`. Standard
names first (OpenTelemetry GenAI, hardware, process); `dsagent.` only where no
convention exists. The one exception is engine/metrics.py, which imports
nothing of ours and spells the engine's own metrics: engine_metrics.py lists
them and a test holds the two equal.
"""

from __future__ import annotations

from dsagent.agent.metrics.agent_metrics import (
    AGENT_CPU,
    AGENT_METRICS,
    AGENT_OVERHEAD,
    AGENT_PSS,
    CLOCK_ERROR,
    EVENTS,
    SAMPLES_UNKNOWN,
    SERIES_OVERFLOWED,
    SINK_ACKNOWLEDGED,
    SINK_DROPPED,
    SINK_FAILED,
    SINK_LOST,
    SINK_MADE,
    SINK_QUEUED,
    SINK_SENT,
    SOURCE_COST,
    SOURCE_DROPPED,
    SOURCE_LAG,
    SOURCE_STATE,
    TARGET_INFO,
    UNCOUNTED_LOSSES,
)
from dsagent.agent.metrics.anomaly_metrics import ANOMALY_ACTIVE, ANOMALY_FINDINGS, ANOMALY_METRICS
from dsagent.agent.metrics.device_metrics import (
    CGROUP_CPU_THROTTLED,
    GPU_CLOCK,
    GPU_CLOCK_LIMIT,
    GPU_ENERGY,
    GPU_ERRORS,
    GPU_MEMORY_LIMIT,
    GPU_MEMORY_USAGE,
    GPU_MEMORY_UTILIZATION,
    GPU_METRICS,
    GPU_POWER,
    GPU_POWER_LIMIT,
    GPU_PROCESSES,
    GPU_TARGET_MEMORY_USAGE,
    GPU_TEMPERATURE,
    GPU_THROTTLED,
    GPU_UTILIZATION,
    PROCESS_CONTEXT_SWITCHES,
    PROCESS_CPU_TIME,
    PROCESS_DISK_IO,
    PROCESS_MEMORY_USAGE,
    PROCESS_METRICS,
    PROCESS_OPEN_FILES,
    PROCESS_PAGING_FAULTS,
    PROCESS_THREAD_COUNT,
    SYSTEM_CPU_TIME,
)
from dsagent.agent.metrics.engine_metrics import (
    CACHE_HIT,
    CACHE_LATENCY,
    CACHE_REQUEST,
    ENGINE_METRICS,
)
from dsagent.agent.metrics.engine_span_metrics import (
    ENGINE_SPAN_FIGURES,
    ENGINE_SPAN_METRICS,
    ENGINE_SPANS,
    OTLP_RECEIVER_REQUESTS,
    OTLP_RECEIVER_SPANS,
)
from dsagent.agent.metrics.kernel_delays import KERNEL_DELAY, KERNEL_DELAYS_DROPPED, KERNEL_METRICS
from dsagent.agent.metrics.metric import Metric
from dsagent.agent.metrics.served import SERVED_METRICS
from dsagent.agent.metrics.sidecar_metrics import SIDECAR_METRICS
from dsagent.agent.metrics.slo_metrics import (
    CACHE_CIRCUIT,
    CACHE_HIT_RATIO,
    SLO_BAD,
    SLO_BLIND,
    SLO_BURN_RATE,
    SLO_BURNT,
    SLO_EVENTS,
    SLO_METRICS,
    SLO_STATE,
)
from dsagent.agent.metrics.tally_metrics import (
    DRAFT_ACCEPTANCE,
    DRAFT_LENGTH,
    EXPERT_LOAD,
    EXPERT_LOAD_WORST,
    EXPERTS_DEAD,
    TALLY_METRICS,
)
from dsagent.instrumentation import names

__all__ = [  # and every metric by its name below
    "AGENT_CPU",
    "AGENT_METRICS",
    "AGENT_OVERHEAD",
    "AGENT_PSS",
    "ANOMALY_ACTIVE",
    "ANOMALY_FINDINGS",
    "ANOMALY_METRICS",
    "CACHE_CIRCUIT",
    "CACHE_HIT",
    "CACHE_HIT_RATIO",
    "CACHE_LATENCY",
    "CACHE_REQUEST",
    "CATALOGUE",
    "CGROUP_CPU_THROTTLED",
    "CLOCK_ERROR",
    "DRAFT_ACCEPTANCE",
    "DRAFT_LENGTH",
    "ENGINE_METRICS",
    "ENGINE_SPANS",
    "ENGINE_SPAN_FIGURES",
    "ENGINE_SPAN_METRICS",
    "EVENTS",
    "EXPERTS_DEAD",
    "EXPERT_LOAD",
    "EXPERT_LOAD_WORST",
    "GPU_CLOCK",
    "GPU_CLOCK_LIMIT",
    "GPU_ENERGY",
    "GPU_ERRORS",
    "GPU_MEMORY_LIMIT",
    "GPU_MEMORY_USAGE",
    "GPU_MEMORY_UTILIZATION",
    "GPU_METRICS",
    "GPU_POWER",
    "GPU_POWER_LIMIT",
    "GPU_PROCESSES",
    "GPU_TARGET_MEMORY_USAGE",
    "GPU_TEMPERATURE",
    "GPU_THROTTLED",
    "GPU_UTILIZATION",
    "KERNEL_DELAY",
    "KERNEL_DELAYS_DROPPED",
    "KERNEL_METRICS",
    "OTLP_RECEIVER_REQUESTS",
    "OTLP_RECEIVER_SPANS",
    "PROCESS_CONTEXT_SWITCHES",
    "PROCESS_CPU_TIME",
    "PROCESS_DISK_IO",
    "PROCESS_MEMORY_USAGE",
    "PROCESS_METRICS",
    "PROCESS_OPEN_FILES",
    "PROCESS_PAGING_FAULTS",
    "PROCESS_THREAD_COUNT",
    "SAMPLES_UNKNOWN",
    "SERIES_OVERFLOWED",
    "SERVED_METRICS",
    "SIDECAR_METRICS",
    "SINK_ACKNOWLEDGED",
    "SINK_DROPPED",
    "SINK_FAILED",
    "SINK_LOST",
    "SINK_MADE",
    "SINK_QUEUED",
    "SINK_SENT",
    "SLO_BAD",
    "SLO_BLIND",
    "SLO_BURNT",
    "SLO_BURN_RATE",
    "SLO_EVENTS",
    "SLO_METRICS",
    "SLO_STATE",
    "SOURCE_COST",
    "SOURCE_DROPPED",
    "SOURCE_LAG",
    "SOURCE_STATE",
    "SYSTEM_CPU_TIME",
    "TALLY_METRICS",
    "TARGET_INFO",
    "UNCOUNTED_LOSSES",
    "Metric",
]

OTHER = "~other"  # a label's value once its cap is reached
MAX_LABEL_VALUES = 64  # different values of one label of one metric

MODEL = names.REQUEST_MODEL
TOKEN_TYPE = "gen_ai.token.type"
_GEN_AI = (names.OPERATION_NAME, names.PROVIDER_NAME, MODEL)

# Bounds recommended by the GenAI conventions; every configured limit is added as one more.
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    "histogram",
    "s",
    "From the request's arrival to the first byte of its first token.",
    _GEN_AI,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    "histogram",
    "s",
    "(duration - TTFT) / (output tokens - 1); none for one-token replies.",
    _GEN_AI,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    "histogram",
    "s",
    "From the request's arrival to its last byte, or to its failure.",
    (*_GEN_AI, names.ERROR_TYPE),
    tuple(0.01 * 2**i for i in range(14)),
)
TOKEN_USAGE = Metric(
    "gen_ai.client.token.usage",
    "histogram",
    "{token}",
    "Tokens of a request, by type: input or output.",
    (*_GEN_AI, TOKEN_TYPE),
    tuple(float(4**i) for i in range(14)),
)

REQUESTS = Metric(
    "dsagent.requests",
    "counter",
    "{request}",
    "Requests accounted for; partial ones began before the agent attached and count here only.",
    (MODEL, "outcome", "partial"),
)
REQUEST_CAUSE = Metric(
    "dsagent.request.cause",
    "counter",
    "s",
    "Where the time of whole requests went; with cause unattributed it equals their duration.",
    (MODEL, "cause", "how"),
)
TTFT_CAUSE = Metric(
    "dsagent.request.ttft.cause",
    "counter",
    "s",
    "Where the time up to the first token went, likewise.",
    (MODEL, "cause", "how"),
)


STEP_DURATION = Metric(
    "dsagent.engine.step.duration",
    "histogram",
    "s",
    "One iteration of the engine's loop; its count is the number of steps.",
    ("phase",),
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
STEP_BATCH = Metric(
    "dsagent.engine.step.batch_size",
    "histogram",
    "{request}",
    "Requests served by one step.",
    (),
    (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0),
)
# The same by the step's size: a label's value is the upper bound of its class, or +Inf.
BATCH_CLASSES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXT_CLASSES = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
STEP_DURATION_BY_BATCH = Metric(
    "dsagent.engine.step.duration_by_batch",
    "histogram",
    "s",
    "Duration of the steps that served this many requests, and more than the class below.",
    ("batch",),
    STEP_DURATION.bounds,
)
STEP_DURATION_BY_CONTEXT = Metric(
    "dsagent.engine.step.duration_by_context",
    "histogram",
    "s",
    "Duration of the steps whose requests had so many tokens in the KV cache, all together.",
    ("context",),
    STEP_DURATION.bounds,
)
STEP_TOKENS = Metric(
    "dsagent.engine.step.tokens",
    "counter",
    "{token}",
    "Tokens computed by the steps, by phase: prefill or decode.",
    ("phase",),
)
STEP_PART = Metric(
    "dsagent.engine.step.part",
    "counter",
    "s",
    "Time of the steps by part: schedule, prepare, forward, sample, output, other.",
    ("part",),
)
PREEMPTIONS = Metric(
    "dsagent.engine.preemptions",
    "counter",
    "{request}",
    "Requests taken out of the batch to be computed again.",
)
REQUESTS_WAITING = Metric(
    "dsagent.engine.requests.waiting",
    "gauge",
    "{request}",
    "Requests not admitted after the last step was scheduled.",
)
REQUESTS_RUNNING = Metric(
    "dsagent.engine.requests.running", "gauge", "{request}", "Requests admitted in the last step."
)
KV_BLOCKS_USED = Metric(
    "dsagent.engine.kv_blocks.used", "gauge", "{block}", "KV cache blocks in use in the last step."
)
KV_BLOCKS_LIMIT = Metric(
    "dsagent.engine.kv_blocks.limit", "gauge", "{block}", "KV cache blocks the engine has."
)

_SERVED = {metric.name: metric for metric in SERVED_METRICS}
SERVED_RUNNING = _SERVED["dsagent.served.requests.running"]
SERVED_WAITING = _SERVED["dsagent.served.requests.waiting"]
SERVED_KV_USAGE = _SERVED["dsagent.served.kv_cache.usage"]

REQUEST_METRICS = (
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    REQUEST_DURATION,
    TOKEN_USAGE,
    REQUESTS,
    REQUEST_CAUSE,
    TTFT_CAUSE,
)
STEP_METRICS = (
    STEP_DURATION,
    STEP_DURATION_BY_BATCH,
    STEP_DURATION_BY_CONTEXT,
    STEP_BATCH,
    STEP_TOKENS,
    STEP_PART,
    PREEMPTIONS,
    REQUESTS_WAITING,
    REQUESTS_RUNNING,
    KV_BLOCKS_USED,
    KV_BLOCKS_LIMIT,
)

SAMPLE_METRICS = {
    metric.name: metric
    for metric in (
        *GPU_METRICS,
        *PROCESS_METRICS,
        *ENGINE_SPAN_METRICS,
        *TALLY_METRICS,
        *SERVED_METRICS,
        *ANOMALY_METRICS,
        AGENT_CPU,
        AGENT_PSS,
        AGENT_OVERHEAD,
    )
}
CATALOGUE: tuple[Metric, ...] = (
    *REQUEST_METRICS,
    *SLO_METRICS,
    *ANOMALY_METRICS,
    *STEP_METRICS,
    *KERNEL_METRICS,
    *AGENT_METRICS,
    *SIDECAR_METRICS,
    *GPU_METRICS,
    *PROCESS_METRICS,
    *ENGINE_SPAN_METRICS,
    *TALLY_METRICS,
    *SERVED_METRICS,
    *ENGINE_METRICS,
)
