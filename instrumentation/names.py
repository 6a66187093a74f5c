"""Every span and attribute name is spelled here and nowhere else.

Standard names first (OpenTelemetry semantic conventions, GenAI: Development);
`dsagent.` only where there is no convention. Names of metrics are in the
agent's catalogue.
"""

from __future__ import annotations

SCOPE = "dsagent"  # instrumentation scope

# Spans. A request's own is named "{operation} {model}".
ACCOUNT_SPAN = "dsagent.account"  # beside a SERVER span that the engine exports itself
QUEUE_SPAN = "queue"
PREFILL_SPAN = "prefill"  # one a chunk
DECODE_SPAN = "decode"
DECODE_STEP_SPAN = "decode step"
STEP_SPAN = "engine step"

# GenAI conventions.
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
PROCESS_PID = "process.pid"

# Requests.
REQUEST_ID = "dsagent.request.id"
REQUEST_EXTERNAL_ID = "dsagent.request.external_id"  # X-Request-Id
REQUEST_TENANT = "dsagent.request.tenant"
REQUEST_TTFT_NS = "dsagent.request.ttft_ns"
REQUEST_STEPS = "dsagent.request.steps"
SAMPLING_REASON = "dsagent.sampling.reason"  # why the agent kept the trace

# Steps and shares.
ENGINE_ID = "dsagent.engine.id"
STEP_ID = "dsagent.step.id"
STEP_PHASE = "dsagent.step.phase"  # prefill, decode or mixed
STEP_SCHEDULE_NS = "dsagent.step.schedule_ns"
STEP_PREPARE_NS = "dsagent.step.prepare_ns"
STEP_FORWARD_NS = "dsagent.step.forward_ns"
STEP_SAMPLE_NS = "dsagent.step.sample_ns"
STEP_OUTPUT_NS = "dsagent.step.output_ns"
STEP_PREFILL_TOKENS = "dsagent.step.prefill_tokens"
STEP_DECODE_TOKENS = "dsagent.step.decode_tokens"
STEP_WAITING = "dsagent.step.waiting"
STEP_RUNNING = "dsagent.step.running"
STEP_PREEMPTED = "dsagent.step.preempted"
STEP_KV_BLOCKS_USED = "dsagent.step.kv_blocks_used"
STEP_KV_BLOCKS_TOTAL = "dsagent.step.kv_blocks_total"
STEP_ADMISSION = "dsagent.step.admission"
STEP_GRAPH = "dsagent.step.graph"
STEP_SHARES = "dsagent.step.shares"  # requests in the batch, those without a link too
SHARE_PHASE = "dsagent.share.phase"
SHARE_SCHEDULED_TOKENS = "dsagent.share.scheduled_tokens"
SHARE_CACHED_TOKENS = "dsagent.share.cached_tokens"
SHARE_CONTEXT_TOKENS = "dsagent.share.context_tokens"
SHARE_OUTPUT_TOKENS = "dsagent.share.output_tokens"
SHARE_RECOMPUTE = "dsagent.share.recompute"  # computed again after a preemption

_PART_PREFIX = "dsagent.part."


def part(cause: str) -> str:
    """The attribute that says how much of a request's time went to a cause."""
    return f"{_PART_PREFIX}{cause}_ns"
