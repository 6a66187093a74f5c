"""Accounts to fill ledgers and pages with."""

from __future__ import annotations

from dsagent.agent.attribution.account import Account, Culprit, DelayedBy, Evidence, Part
from dsagent.instrumentation.records import RequestRecord, request_key

MS = 1_000_000


def record(
    request_id: str,
    *,
    trace_id: int = 1,
    external_id: str | None = None,
    sent_ms: int = 1000,
    e2e_ms: int = 100,
    ttft_ms: int | None = 40,
    output_tokens: int = 7,
) -> RequestRecord:
    received_ns = (sent_ms - e2e_ms) * MS
    first_ns = None if ttft_ms is None else received_ns + ttft_ms * MS
    return RequestRecord(
        request_key=request_key(request_id),
        request_id=request_id,
        trace_id=trace_id,
        span_id=5,
        parent_span_id=None,
        sampled=True,
        operation="chat",
        model="smollm2",
        tenant=None,
        external_id=external_id,
        pid=10,
        tid=10,
        received_ns=received_ns,
        tokenised_ns=received_ns + MS,
        queued_ns=received_ns + MS,
        first_scheduled_ns=received_ns + 2 * MS,
        first_token_ns=first_ns,
        first_sent_ns=first_ns,
        finished_ns=sent_ms * MS,
        sent_ns=sent_ms * MS,
        prompt_tokens=113,
        output_tokens=output_tokens,
        cached_tokens=0,
        max_tokens=16,
        temperature=0.7,
        top_p=None,
        finish_reason="length",
        error=None,
    )


def account(
    of: RequestRecord,
    *parts: Part,
    partial: bool = False,
    finished: bool = True,
    delayed_by: tuple[DelayedBy, ...] = (),
) -> Account:
    """What the parts leave of e2e is unattributed; all of TTFT is its own prefill."""
    ttft_ns = of.ttft_ns
    own = () if ttft_ns is None else (Part("prefill.compute", ttft_ns, "modelled"),)
    return Account(
        record=of,
        partial=partial,
        finished=finished,
        e2e_ns=of.e2e_ns,
        parts=parts,
        unattributed_ns=of.e2e_ns - sum(part.ns for part in parts),
        ttft_parts=own,
        ttft_unattributed_ns=None if ttft_ns is None else 0,
        delayed_by=delayed_by,
        step_ids=(1, 2, 3),
    )


def interfered(request_id: str = "chatcmpl-0123456789abcdef0123456789abcdef") -> Account:
    """62 of 100 ms behind another's prefill, 10 for the CPU, and a request that looks hostile."""
    other = "chatcmpl-fedcba9876543210fedcba9876543210"
    hostile = "evil\x1b[31m\nrequest"
    return account(
        record(request_id, trace_id=0x4BF92F3577B34DA6A3CE929D0E0E4736, external_id="ticket-7"),
        Part("frontend.in", 1 * MS, "measured"),
        Part("queue.wait", 1 * MS, "measured"),
        Part("prefill.compute", 8 * MS, "modelled"),
        Part("decode.compute", 16 * MS, "modelled"),
        Part(
            "batch.prefill_interference",
            62 * MS,
            "modelled",
            (Evidence("steps", "prefill tokens of others", 512, "{token}"),),
            (
                Culprit("request", other, 60 * MS, request_id=other, trace_id="0" * 31 + "a"),
                Culprit("request", hostile, 2 * MS, request_id=hostile, trace_id="0" * 31 + "b"),
            ),
        ),
        Part(
            "cpu.runqueue",
            10 * MS,
            "measured",
            (Evidence("kernel", "runnable, not running", 0.010, "s"),),
            (Culprit("process", "stress\x07-ng", 10 * MS, pid=77),),
        ),
        Part("engine.gap", MS // 4, "measured"),
        delayed_by=(
            DelayedBy("batch.prefill_interference", other, "0" * 31 + "a", 60 * MS),
            DelayedBy("batch.prefill_interference", hostile, "0" * 31 + "b", 2 * MS),
        ),
    )
