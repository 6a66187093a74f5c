"""Small builders for steps, shares, requests and kernel facts."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsagent.agent.facts import FACT_DTYPE, Facts, Kind
from dsagent.instrumentation.records import (
    Admission,
    Phase,
    RequestRecord,
    Share,
    Step,
)


def share(
    key: int,
    phase: Phase = Phase.DECODE,
    tokens: int = 1,
    context: int = 100,
    output: int = 1,
    recompute: bool = False,
) -> Share:
    return Share(key, phase, tokens, 0, context, output, recompute)


def step(
    step_id: int,
    *,
    start: int,
    end: int,
    schedule: int = 0,
    prepare: int = 0,
    forward: int,
    shares: tuple[Share, ...] = (),
    admission: Admission = Admission.ADMITTED,
) -> Step:
    return Step(
        engine_id=1,
        step_id=step_id,
        pid=10,
        tid=11,
        start_ns=start,
        end_ns=end,
        schedule_ns=schedule,
        prepare_ns=prepare,
        forward_ns=forward,
        sample_ns=0,
        output_ns=0,
        prefill_tokens=sum(s.scheduled_tokens for s in shares if s.phase is Phase.PREFILL),
        decode_tokens=sum(s.scheduled_tokens for s in shares if s.phase is Phase.DECODE),
        waiting=0,
        running=len(shares),
        preempted=0,
        kv_blocks_used=1,
        kv_blocks_total=10,
        admission=admission,
        graph=False,
        shares=shares,
    )


def record(key: int, *, received: int, sent: int, **given: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_key": key,
        "request_id": f"req-{key}",
        "trace_id": key,
        "span_id": key,
        "parent_span_id": None,
        "sampled": None,
        "operation": "chat",
        "model": "m",
        "tenant": None,
        "external_id": None,
        "pid": 10,
        "tid": 20,
        "received_ns": received,
        "tokenised_ns": None,
        "queued_ns": None,
        "first_scheduled_ns": None,
        "first_token_ns": None,
        "first_sent_ns": None,
        "finished_ns": None,
        "sent_ns": sent,
        "prompt_tokens": 5,
        "output_tokens": 3,
        "cached_tokens": 0,
        "max_tokens": 16,
        "temperature": 0.0,
        "top_p": 1.0,
        "finish_reason": "stop",
        "error": None,
    }
    return RequestRecord(**(values | given))


def fact(
    kind: Kind,
    start: int,
    end: int,
    *,
    tid: int,
    ns: int | None = None,
    exact: int = 1,
    step_id: int = 0,
    culprit_pid: int = 0,
    culprit_tid: int = 0,
) -> tuple[int, ...]:
    if end < start:
        raise ValueError("a fact's end lies before its start")
    return (
        int(kind),
        exact,
        0,
        1,
        10,
        tid,
        culprit_pid,
        culprit_tid,
        step_id,
        start,
        end,
        end - start if ns is None else ns,
    )


def facts(*rows: tuple[int, ...]) -> Facts:
    return np.array(list(rows), FACT_DTYPE)
