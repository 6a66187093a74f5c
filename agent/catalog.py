"""Every metric that the agent or its reference engine emits: the one place where it is spelled.

Exporters, documents, boards, alerts and tests read `CATALOGUE`. Standard
names first (OpenTelemetry GenAI, hardware, process); `dsagent.` only where no
convention exists. The one exception is engine/metrics.py, which imports
nothing of ours and spells the engine's own metrics: engine_metrics.py lists
them and a test holds the two equal.
"""

from __future__ import annotations

from dsagent.agent.device_metrics import (
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
from dsagent.agent.engine_metrics import (
    CACHE_HIT,
    CACHE_LATENCY,
    CACHE_REQUEST,
    ENGINE_METRICS,
)
from dsagent.agent.kernel_delays import KERNEL_DELAY, KERNEL_DELAYS_DROPPED, KERNEL_METRICS
from dsagent.agent.metric import Metric
from dsagent.agent.served import SERVED_METRICS
from dsagent.agent.slo_metrics import (
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
from dsagent.instrumentation import names

__all__ = [  # and every metric by its name below
    "CACHE_CIRCUIT",
    "CACHE_HIT",
    "CACHE_HIT_RATIO",
    "CACHE_LATENCY",
    "CACHE_REQUEST",
    "CATALOGUE",
    "CGROUP_CPU_THROTTLED",
    "ENGINE_METRICS",
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
    "PROCESS_CONTEXT_SWITCHES",
    "PROCESS_CPU_TIME",
    "PROCESS_DISK_IO",
    "PROCESS_MEMORY_USAGE",
    "PROCESS_METRICS",
    "PROCESS_OPEN_FILES",
    "PROCESS_PAGING_FAULTS",
    "PROCESS_THREAD_COUNT",
    "SERVED_METRICS",
    "SLO_BAD",
    "SLO_BLIND",
    "SLO_BURNT",
    "SLO_BURN_RATE",
    "SLO_EVENTS",
    "SLO_METRICS",
    "SLO_STATE",
    "SYSTEM_CPU_TIME",
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

# To Prometheus only: OTLP has the same as its resource. No pid: it would multiply the series.
TARGET_INFO = Metric(
    "target_info",
    "gauge",
    "{target}",
    "1; what the agent is attached to.",
    (
        names.SERVICE_NAME,
        "service.namespace",
        "service.version",
        names.SERVICE_INSTANCE_ID,
        "deployment.environment.name",
        "container.id",
        "k8s.namespace.name",
        "k8s.pod.name",
        "k8s.pod.uid",
    ),
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

SOURCE_STATE = Metric(
    "dsagent.source.state",
    "gauge",
    "{state}",
    "1 for the state a source is in: ok, unavailable, lagging or failed.",
    ("source", "state"),
)
SOURCE_DROPPED = Metric(
    "dsagent.source.dropped", "counter", "{record}", "Records a source lost, counted.", ("source",)
)
SOURCE_LAG = Metric("dsagent.source.lag", "gauge", "s", "How far a source is behind.", ("source",))
SOURCE_COST = Metric(
    "dsagent.source.cost", "counter", "s", "CPU time spent by a source.", ("source",)
)
SINK_SENT = Metric(
    "dsagent.sink.sent", "counter", "{item}", "Items a sink handed to its back end.", ("sink",)
)
SINK_ACKNOWLEDGED = Metric(
    "dsagent.sink.acknowledged",
    "counter",
    "{item}",
    "Items that the back end said it took.",
    ("sink",),
)
SINK_FAILED = Metric(
    "dsagent.sink.failed",
    "counter",
    "{item}",
    "Items sent that the back end refused or did not answer for.",
    ("sink",),
)
SINK_DROPPED = Metric(
    "dsagent.sink.dropped", "counter", "{item}", "Items given up before sending.", ("sink",)
)
SINK_MADE = Metric(
    "dsagent.sink.made",
    "counter",
    "{item}",
    "Items made for a sink's back end, with those an earlier run left on disk; each is queued, "
    "sent or dropped.",
    ("sink", "kind"),
)
SINK_QUEUED = Metric(
    "dsagent.sink.queued",
    "gauge",
    "{item}",
    "Items that wait for a sink's back end, or for its answer.",
    ("sink", "kind"),
)
SINK_LOST = Metric(
    "dsagent.sink.lost",
    "counter",
    "{item}",
    "Items that did not arrive, by why: those failed and those dropped.",
    ("sink", "kind", "reason"),
)
UNCOUNTED_LOSSES = Metric(
    "dsagent.uncounted_losses",
    "gauge",
    "{record}",
    "Records written and neither read nor counted as lost: must be 0.",
)
EVENTS = Metric(
    "dsagent.events",
    "counter",
    "{event}",
    "Rare events: a stalled loop, a source lost, a child that came or went.",
    ("event",),
)
SAMPLES_UNKNOWN = Metric(
    "dsagent.samples.unknown",
    "counter",
    "{sample}",
    "Samples whose name or attributes are not in the catalogue, left out.",
)
SERIES_OVERFLOWED = Metric(
    "dsagent.series.overflowed",
    "counter",
    "{update}",
    "Updates that found the budget of series used up: they are in ~other, gauges are left out.",
)
CLOCK_ERROR = Metric(
    "dsagent.clock.error", "gauge", "s", "Bound on the error between monotonic and wall clock."
)
AGENT_CPU = Metric("dsagent.agent.cpu.time", "counter", "s", "CPU time the agent itself used.")
AGENT_PSS = Metric(
    "dsagent.agent.memory.pss", "gauge", "By", "Memory of the agent and its children (PSS)."
)
AGENT_OVERHEAD = Metric(
    "dsagent.agent.overhead", "gauge", "1", "The agent's cost to the target, as it knows it."
)

OTLP_RECEIVER_REQUESTS = Metric(
    "dsagent.otlp_receiver.requests",
    "counter",
    "{request}",
    "Requests to the OTLP receiver, by protocol (http, grpc) and the code answered.",
    ("protocol", "code"),
)
OTLP_RECEIVER_SPANS = Metric(
    "dsagent.otlp_receiver.spans",
    "counter",
    "{span}",
    "Spans received: the engine's own of a request, or others, which are only passed on.",
    ("of",),
)
ENGINE_SPANS = Metric(
    "dsagent.engine_span.spans",
    "counter",
    "{span}",
    "The engine's own spans of requests: joined to our account, unmatched, or repeated.",
    ("outcome",),
)
ENGINE_SPAN_FIGURES = Metric(
    "dsagent.engine_span.figures",
    "counter",
    "{figure}",
    "Figures of the engine's own spans compared with ours; times agree within 5 ms or 2 %.",
    ("figure", "agrees"),
)
ENGINE_SPAN_METRICS = (
    OTLP_RECEIVER_REQUESTS,
    OTLP_RECEIVER_SPANS,
    ENGINE_SPANS,
    ENGINE_SPAN_FIGURES,
)

EXPERT_LOAD = Metric(
    "dsagent.moe.expert_load.max_ratio",
    "gauge",
    "1",
    "Tokens routed to a layer's busiest expert, over the mean of its experts; last minute.",
    ("layer",),
)
EXPERT_LOAD_WORST = Metric(
    "dsagent.moe.expert_load.worst_ratio",
    "gauge",
    "1",
    "The same, of the layer where it is largest.",
)
EXPERTS_DEAD = Metric(
    "dsagent.moe.experts.dead",
    "gauge",
    "{expert}",
    "Experts of a layer that got no token in the last minute, where 20 each would be fair.",
    ("layer",),
)
DRAFT_ACCEPTANCE = Metric(
    "dsagent.spec_decode.acceptance_ratio",
    "gauge",
    "1",
    "Drafts whose token at this position was accepted; last minute.",
    ("position",),
)
DRAFT_LENGTH = Metric(
    "dsagent.spec_decode.acceptance_length",
    "gauge",
    "{token}",
    "Tokens a draft yields: 1 + accepted tokens / drafts; last minute.",
)
TALLY_METRICS = (EXPERT_LOAD, EXPERT_LOAD_WORST, EXPERTS_DEAD, DRAFT_ACCEPTANCE, DRAFT_LENGTH)

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
AGENT_METRICS = (
    TARGET_INFO,
    SOURCE_STATE,
    SOURCE_DROPPED,
    SOURCE_LAG,
    SOURCE_COST,
    SINK_SENT,
    SINK_ACKNOWLEDGED,
    SINK_FAILED,
    SINK_DROPPED,
    SINK_MADE,
    SINK_QUEUED,
    SINK_LOST,
    UNCOUNTED_LOSSES,
    EVENTS,
    SAMPLES_UNKNOWN,
    SERIES_OVERFLOWED,
    CLOCK_ERROR,
    AGENT_CPU,
    AGENT_PSS,
    AGENT_OVERHEAD,
)

SAMPLE_METRICS = {
    metric.name: metric
    for metric in (
        *GPU_METRICS,
        *PROCESS_METRICS,
        *ENGINE_SPAN_METRICS,
        *TALLY_METRICS,
        *SERVED_METRICS,
        AGENT_CPU,
        AGENT_PSS,
        AGENT_OVERHEAD,
    )
}
CATALOGUE: tuple[Metric, ...] = (
    *REQUEST_METRICS,
    *SLO_METRICS,
    *STEP_METRICS,
    *KERNEL_METRICS,
    *AGENT_METRICS,
    *GPU_METRICS,
    *PROCESS_METRICS,
    *ENGINE_SPAN_METRICS,
    *TALLY_METRICS,
    *SERVED_METRICS,
    *ENGINE_METRICS,
)
