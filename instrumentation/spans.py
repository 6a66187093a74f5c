"""Spans made of records: the one function for the agent and for the SDK in the engine.

A request is a span with its queue, prefill chunks and decode below it. A step is
a span of its own, root of its own trace, linked to every request it served;
what the request did in a step links back to it. Ids are hashes of what they name,
so that the two sides meet without talking to each other. Times are
CLOCK_MONOTONIC; who exports a span shifts it to the wall clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsagent.instrumentation import names
from dsagent.instrumentation.records import Phase, RequestRecord, Share, Step

Value = str | bool | int | float | tuple[str, ...]
Kind = Literal["SERVER", "INTERNAL"]
StepSpans = Literal["worst", "all"]

WORST_STEPS = 10


@dataclass(frozen=True, slots=True)
class Link:
    """Points at a span in another trace."""

    trace_id: int
    span_id: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span, of no SDK. Times are CLOCK_MONOTONIC nanoseconds."""

    name: str
    kind: Kind
    trace_id: int
    span_id: int
    parent_span_id: int | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    links: tuple[Link, ...] = ()
    error: str | None = None  # what went wrong: the status is ERROR then, and unset otherwise


def _hashed(bits: int, *what: object) -> int:
    digest = hashlib.blake2b("\0".join(map(str, what)).encode(), digest_size=bits // 8).digest()
    return int.from_bytes(digest, "big") or 1


def step_trace_id(engine_id: int, step_id: int) -> int:
    return _hashed(128, "step trace", engine_id, step_id)


def step_span_id(engine_id: int, step_id: int) -> int:
    return _hashed(64, "step span", engine_id, step_id)


def request_link(record: RequestRecord, share: Share) -> Link:
    """From a step to the SERVER span of a request it served, whoever exports that."""
    return Link(record.trace_id, record.span_id, share_attributes(share))


def share_attributes(share: Share) -> dict[str, Value]:
    return {
        names.SHARE_PHASE: share.phase.name.lower(),
        names.SHARE_SCHEDULED_TOKENS: share.scheduled_tokens,
        names.SHARE_CACHED_TOKENS: share.cached_tokens,
        names.SHARE_CONTEXT_TOKENS: share.context_tokens,
        names.SHARE_OUTPUT_TOKENS: share.output_tokens,
        names.SHARE_RECOMPUTE: share.recompute,
    }


def step_span(step: Step, links: Iterable[Link]) -> Span:
    """The span of one engine step. `links`: see `request_link`, of the requests that are kept."""
    prefill, decode = step.prefill_tokens > 0, step.decode_tokens > 0
    return Span(
        name=names.STEP_SPAN,
        kind="INTERNAL",
        trace_id=step_trace_id(step.engine_id, step.step_id),
        span_id=step_span_id(step.engine_id, step.step_id),
        parent_span_id=None,
        start_ns=step.start_ns,
        end_ns=step.end_ns,
        attributes={
            names.ENGINE_ID: f"{step.engine_id:016x}",
            names.STEP_ID: step.step_id,
            names.STEP_PHASE: "mixed" if prefill and decode else "prefill" if prefill else "decode",
            names.STEP_SCHEDULE_NS: step.schedule_ns,
            names.STEP_PREPARE_NS: step.prepare_ns,
            names.STEP_FORWARD_NS: step.forward_ns,
            names.STEP_SAMPLE_NS: step.sample_ns,
            names.STEP_OUTPUT_NS: step.output_ns,
            names.STEP_PREFILL_TOKENS: step.prefill_tokens,
            names.STEP_DECODE_TOKENS: step.decode_tokens,
            names.STEP_WAITING: step.waiting,
            names.STEP_RUNNING: step.running,
            names.STEP_PREEMPTED: step.preempted,
            names.STEP_KV_BLOCKS_USED: step.kv_blocks_used,
            names.STEP_KV_BLOCKS_TOTAL: step.kv_blocks_total,
            names.STEP_ADMISSION: step.admission.name.lower(),
            names.STEP_GRAPH: step.graph,
            names.STEP_SHARES: len(step.shares) + step.shares_omitted,
        },
        links=tuple(links),
    )


def request_spans(
    record: RequestRecord,
    steps: Sequence[Step],
    *,
    parts: Mapping[str, int] | None,
    step_spans: StepSpans = "worst",
    provider: str = "reference",
) -> list[Span]:
    """A request's own span first, then those below it.

    `steps`: those it took part in, in order; others are passed over. `parts`: nanoseconds by
    cause, where they are known. Where the engine exports the SERVER span itself, the request's
    span is one named `dsagent.account` below that.
    """
    took_part = [
        (step, share)
        for step in steps
        for share in step.shares
        if share.request_key == record.request_key
    ]
    root = _request_span(record, len(took_part), parts or {}, provider)
    spans = [root]
    if record.queued_ns is not None and record.first_scheduled_ns is not None:
        spans.append(_child(root, names.QUEUE_SPAN, 0, record.queued_ns, record.first_scheduled_ns))
    spans += [
        _in_step(root, names.PREFILL_SPAN, step, share)
        for step, share in took_part
        if share.phase is Phase.PREFILL
    ]
    if record.first_token_ns is not None and record.finished_ns is not None:
        decodes = [(step, share) for step, share in took_part if share.phase is Phase.DECODE]
        if decodes:
            decode = _child(root, names.DECODE_SPAN, 0, record.first_token_ns, record.finished_ns)
            spans.append(decode)
            if step_spans == "worst":
                slowest = sorted(decodes, key=lambda pair: pair[0].start_ns - pair[0].end_ns)
                decodes = sorted(slowest[:WORST_STEPS], key=lambda pair: pair[0].start_ns)
            spans += [
                _in_step(decode, names.DECODE_STEP_SPAN, step, share) for step, share in decodes
            ]
    return spans


def _request_span(
    record: RequestRecord, steps: int, parts: Mapping[str, int], provider: str
) -> Span:
    error = record.error or ("abort" if record.finish_reason == "abort" else None)
    possible: dict[str, Value | None] = {
        names.OPERATION_NAME: record.operation,
        names.PROVIDER_NAME: provider,
        names.REQUEST_MODEL: record.model,
        names.REQUEST_MAX_TOKENS: record.max_tokens,
        names.REQUEST_TEMPERATURE: record.temperature,
        names.REQUEST_TOP_P: record.top_p,
        names.RESPONSE_ID: record.request_id,
        names.RESPONSE_MODEL: record.model,
        names.RESPONSE_FINISH_REASONS: (
            None if record.finish_reason is None else (record.finish_reason,)
        ),
        names.USAGE_INPUT_TOKENS: record.prompt_tokens,
        names.USAGE_OUTPUT_TOKENS: record.output_tokens,
        names.USAGE_CACHE_READ_INPUT_TOKENS: record.cached_tokens,
        names.ERROR_TYPE: error,
        names.REQUEST_ID: record.request_id,
        names.REQUEST_EXTERNAL_ID: record.external_id,
        names.REQUEST_TENANT: record.tenant,
        names.REQUEST_TTFT_NS: record.ttft_ns,
        names.REQUEST_STEPS: steps,
    }
    attributes = {name: value for name, value in possible.items() if value is not None}
    attributes.update((names.part(cause), ns) for cause, ns in parts.items())
    beside = record.self_exported
    return Span(
        name=names.ACCOUNT_SPAN if beside else f"{record.operation} {record.model}",
        kind="INTERNAL" if beside else "SERVER",
        trace_id=record.trace_id,
        span_id=(
            _hashed(64, "account", record.trace_id, record.span_id) if beside else record.span_id
        ),
        parent_span_id=record.span_id if beside else record.parent_span_id,
        start_ns=record.received_ns,
        end_ns=record.sent_ns,
        attributes=attributes,
        error=error,
    )


def _child(parent: Span, name: str, number: int, start_ns: int, end_ns: int) -> Span:
    return Span(
        name=name,
        kind="INTERNAL",
        trace_id=parent.trace_id,
        span_id=_hashed(64, parent.trace_id, parent.span_id, name, number),
        parent_span_id=parent.span_id,
        start_ns=start_ns,
        end_ns=max(end_ns, start_ns),
        attributes={},
    )


def _in_step(parent: Span, name: str, step: Step, share: Share) -> Span:
    """What a request did in one step, linked to the step's own span."""
    return Span(
        name=name,
        kind="INTERNAL",
        trace_id=parent.trace_id,
        span_id=_hashed(64, parent.trace_id, parent.span_id, name, step.step_id),
        parent_span_id=parent.span_id,
        start_ns=step.start_ns,
        end_ns=step.end_ns,
        attributes={names.STEP_ID: step.step_id, **share_attributes(share)},
        links=(
            Link(
                step_trace_id(step.engine_id, step.step_id),
                step_span_id(step.engine_id, step.step_id),
            ),
        ),
    )
