"""Whether the times and counts of a record can be true.

A record that passes its ring's checks is still another process's word. One with
an end in the far future would hold up everything that waits for a time to be
reached, and one with 2**62 tokens would be the sum on every board for ever, so
it is refused before anybody sees it.
"""

from __future__ import annotations

from dsagent.instrumentation.records import RankStep, RequestOpen, RequestRecord, Step
from dsagent.instrumentation.tally import Tally
from dsagent.instrumentation.wire import Record

SLACK_NS = 1_000_000_000  # orders wrong by less are the join's to clamp
MOST_TOKENS = 1 << 27  # of a request, or in a step: ten times the longest context there is
MOST_REQUESTS = 1 << 24  # waiting or running in one engine
MOST_KV_BLOCKS = 1 << 31
MOST_TALLIED = 1 << 48
MOST_TEMPERATURE = 1e6


def plausible(record: Record, now_ns: int) -> bool:
    """`now_ns`: CLOCK_MONOTONIC, read after the record was."""
    latest_ns = now_ns + SLACK_NS
    match record:
        case Step():
            phases = (
                record.schedule_ns,
                record.prepare_ns,
                record.forward_ns,
                record.sample_ns,
                record.output_ns,
            )
            return (
                0 <= record.start_ns <= record.end_ns <= latest_ns
                and min(phases) >= 0
                and sum(phases) <= record.end_ns - record.start_ns + SLACK_NS
                and _counts_can_be(record)
            )
        case RankStep():
            return (
                0 <= record.start_ns <= record.end_ns <= latest_ns
                and 0 <= (record.device_ns or 0) <= latest_ns
            )
        case Tally():
            return 0 <= record.start_ns <= record.end_ns <= latest_ns and all(
                count <= MOST_TALLIED for count in record.counts
            )
        case RequestOpen():
            return 0 <= record.received_ns <= latest_ns
        case RequestRecord():
            between = (
                record.tokenised_ns,
                record.queued_ns,
                record.first_scheduled_ns,
                record.first_token_ns,
                record.first_sent_ns,
                record.finished_ns,
            )
            return (
                0 <= record.received_ns <= record.sent_ns <= latest_ns
                and all(
                    record.received_ns - SLACK_NS <= moment_ns <= latest_ns
                    for moment_ns in between
                    if moment_ns is not None
                )
                and _limits_can_be(record)
            )


def _counts_can_be(step: Step) -> bool:
    return (
        step.prefill_tokens + step.decode_tokens <= MOST_TOKENS
        and max(step.waiting, step.running, step.preempted, step.shares_omitted) <= MOST_REQUESTS
        and step.kv_blocks_used <= MOST_KV_BLOCKS
        and step.kv_blocks_total <= MOST_KV_BLOCKS
        and all(
            share.scheduled_tokens <= MOST_TOKENS
            and share.cached_tokens <= MOST_TOKENS
            and share.context_tokens <= MOST_TOKENS
            for share in step.shares
        )
    )


def _limits_can_be(record: RequestRecord) -> bool:
    """`max_tokens` is what the caller asked for: any number, which nobody adds up."""
    counts = (record.prompt_tokens, record.output_tokens, record.cached_tokens)
    return (
        all(count is None or count <= MOST_TOKENS for count in counts)
        and abs(record.temperature or 0.0) <= MOST_TEMPERATURE
        and abs(record.top_p or 0.0) <= MOST_TEMPERATURE
    )
