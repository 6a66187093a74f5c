"""A batch as rows of the recording's tables; the order of values is the schema's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dsagent.agent.attribution.account import Account, DelayedBy, Part, culprit_json, part_json
from dsagent.agent.facts import ClockAnchor, Event, Facts, Kind, Sample, SourceStatus
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.instrumentation.records import RankStep, RequestOpen, Step

Row = tuple[Any, ...]

_KIND_NAMES = {int(kind): kind.name.lower() for kind in Kind}


def request_row(account: Account, anchor: ClockAnchor) -> Row:
    r = account.record
    return (
        account.trace_id,
        f"{r.span_id:016x}",
        r.request_id,
        r.request_key,
        None if r.parent_span_id is None else f"{r.parent_span_id:016x}",
        r.sampled,
        r.operation,
        r.model,
        r.tenant,
        r.external_id,
        r.pid,
        r.tid,
        anchor.unix(r.received_ns),
        anchor.unix(r.sent_ns),
        r.received_ns,
        r.tokenised_ns,
        r.queued_ns,
        r.first_scheduled_ns,
        r.first_token_ns,
        r.first_sent_ns,
        r.finished_ns,
        r.sent_ns,
        r.prompt_tokens,
        r.output_tokens,
        r.cached_tokens,
        r.max_tokens,
        r.temperature,
        r.top_p,
        r.finish_reason,
        r.error,
        r.self_exported,
        r.inferred,
        account.partial,
        account.finished,
        account.e2e_ns,
        account.unattributed_ns,
        r.ttft_ns,
        account.ttft_unattributed_ns,
        r.tpot_ns,
        account.engine_id,
        list(account.step_ids),
        [_delayed_by(blamed) for blamed in account.delayed_by],
    )


def _delayed_by(blamed: DelayedBy) -> dict[str, Any]:
    return {
        "cause": blamed.cause,
        "request_id": blamed.request_id,
        "trace_id": blamed.trace_id,
        "ns": blamed.ns,
    }


def part_rows(account: Account) -> Iterator[Row]:
    for whole, parts in (("e2e", account.parts), ("ttft", account.ttft_parts)):
        for position, part in enumerate(parts):
            yield _part_row(account, whole, position, part)


def _part_row(account: Account, whole: str, position: int, part: Part) -> Row:
    return (
        account.trace_id,
        f"{account.record.span_id:016x}",
        account.record.request_id,
        whole,
        position,
        part.cause,
        part.ns,
        part.how,
        part_json(part)["evidence"],
        [culprit_json(culprit) for culprit in part.culprits],
    )


def step_row(step: Step, anchor: ClockAnchor) -> Row:
    return (
        step.engine_id,
        step.step_id,
        step.pid,
        step.tid,
        anchor.unix(step.start_ns),
        step.start_ns,
        step.end_ns,
        step.schedule_ns,
        step.prepare_ns,
        step.forward_ns,
        step.sample_ns,
        step.output_ns,
        step.prefill_tokens,
        step.decode_tokens,
        step.waiting,
        step.running,
        step.preempted,
        step.kv_blocks_used,
        step.kv_blocks_total,
        step.admission.name.lower(),
        step.graph,
        len(step.shares) + step.shares_omitted,
        step.shares_omitted,
        step.inferred,
    )


def share_rows(step: Step) -> Iterator[Row]:
    for share in step.shares:
        yield (
            step.engine_id,
            step.step_id,
            share.request_key,
            share.phase.name.lower(),
            share.scheduled_tokens,
            share.cached_tokens,
            share.context_tokens,
            share.output_tokens,
            share.recompute,
        )


def rank_row(ran: RankStep) -> Row:
    return (
        ran.engine_id,
        ran.step_id,
        ran.rank,
        ran.pid,
        ran.tid,
        ran.start_ns,
        ran.end_ns,
        ran.device_ns,
    )


def open_row(opened: RequestOpen) -> Row:
    parent = opened.parent_span_id
    return (
        f"{opened.trace_id:032x}",
        f"{opened.span_id:016x}",
        opened.request_id,
        opened.request_key,
        None if parent is None else f"{parent:016x}",
        opened.sampled,
        opened.received_ns,
        opened.pid,
        opened.tid,
        opened.inferred,
    )


def poll_row(batch: Explained) -> Row:
    return (
        batch.anchor.unix(batch.now_ns),
        batch.now_ns,
        batch.due_ns,
        batch.facts_complete_ns,
        batch.view.waits_for_kernel,
        list(batch.view.not_looked_at),
        batch.view.since_ns,
        len(batch.opened),
        len(batch.rank_steps),
        len(batch.steps),
        len(batch.facts),
        len(batch.accounts),
    )


def kernel_columns(facts: Facts, names: Mapping[int, str], anchor: ClockAnchor) -> list[Any]:
    """The facts column by column: there may be thousands, so numpy does most of it."""
    kinds = [_KIND_NAMES.get(kind, "unknown") for kind in facts["kind"].tolist()]
    return [
        kinds,
        facts["exact"].astype(bool),
        facts["cpu"].astype(np.int64),
        facts["count"].astype(np.int64),
        facts["pid"].astype(np.int64),
        facts["tid"].astype(np.int64),
        [names.get(tid) for tid in facts["tid"].tolist()],
        facts["culprit_pid"].astype(np.int64),
        facts["culprit_tid"].astype(np.int64),
        [names.get(pid) for pid in facts["culprit_pid"].tolist()],
        [names.get(tid) for tid in facts["culprit_tid"].tolist()],
        facts["step_id"],
        facts["start_ns"] + (anchor.unix_ns - anchor.mono_ns),
        facts["start_ns"],
        facts["end_ns"],
        facts["ns"],
    ]


def sample_rows(samples: Iterable[Sample], anchor: ClockAnchor) -> Iterator[Row]:
    for sample in samples:
        yield (
            anchor.unix(sample.mono_ns),
            sample.mono_ns,
            sample.name,
            sample.value,
            list(sample.attributes.items()),
        )


def source_row(status: SourceStatus, now_ns: int, anchor: ClockAnchor) -> Row:
    return (
        anchor.unix(now_ns),
        now_ns,
        "source",
        status.name,
        status.state,
        status.reason,
        status.dropped,
        status.lag_ns,
        status.cost_ns,
        None,
        None,
        None,
        [],
    )


def sink_row(status: SinkStatus, now_ns: int, anchor: ClockAnchor) -> Row:
    return (
        anchor.unix(now_ns),
        now_ns,
        "sink",
        status.name,
        None,
        status.reason,
        status.dropped,
        None,
        None,
        status.sent,
        status.acknowledged,
        status.failed,
        [],
    )


def event_row(event: Event, anchor: ClockAnchor) -> Row:
    return (
        anchor.unix(event.mono_ns),
        event.mono_ns,
        "event",
        event.name,
        None,
        event.message,
        *(None,) * 6,
        [
            *((key, str(value)) for key, value in event.attributes.items()),
            *((("trace_ids", " ".join(event.trace_ids)),) if event.trace_ids else ()),
        ],
    )
