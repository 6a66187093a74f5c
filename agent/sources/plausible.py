"""Whether the times of a record can be true.

A record that passes its ring's checks is still another process's word. One with
an end in the far future would hold up everything that waits for a time to be
reached, so it is refused before anybody sees it.
"""

from __future__ import annotations

from dsagent.instrumentation.records import RankStep, RequestOpen, RequestRecord, Step
from dsagent.instrumentation.tally import Tally
from dsagent.instrumentation.wire import Record

SLACK_NS = 1_000_000_000  # orders wrong by less are the join's to clamp


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
            )
        case RankStep():
            return (
                0 <= record.start_ns <= record.end_ns <= latest_ns
                and 0 <= (record.device_ns or 0) <= latest_ns
            )
        case Tally():
            return 0 <= record.start_ns <= record.end_ns <= latest_ns
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
            return 0 <= record.received_ns <= record.sent_ns <= latest_ns and all(
                record.received_ns - SLACK_NS <= moment_ns <= latest_ns
                for moment_ns in between
                if moment_ns is not None
            )
