"""Steps as an engine's loop hands them over: plain numbers and tuples, no object per share.

Building a `Share` object for each of 64 requests would cost the loop more than
all the rest of publishing a step; who wants objects makes them elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsagent.instrumentation.records import Admission, Phase, Share, Step, request_key

# step_id, start, end, schedule, prepare, forward, sample, output (ns), prefill_tokens,
# decode_tokens, waiting, running, preempted, kv_blocks_used, kv_blocks_total, admission, graph
StepHead = tuple[
    int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, bool
]
# request_id, is_prefill, scheduled, cached, context and output tokens, is_recompute
ShareRow = tuple[str, bool, int, int, int, int, bool]


def step_from_rows(
    head: StepHead, shares: Sequence[ShareRow], *, engine_id: int, pid: int, tid: int
) -> Step:
    (
        step_id, start_ns, end_ns, schedule_ns, prepare_ns, forward_ns, sample_ns, output_ns,
        prefill_tokens, decode_tokens, waiting, running, preempted, kv_blocks_used,
        kv_blocks_total, admission, graph,
    ) = head  # fmt: skip
    return Step(
        engine_id=engine_id,
        step_id=step_id,
        pid=pid,
        tid=tid,
        start_ns=start_ns,
        end_ns=end_ns,
        schedule_ns=schedule_ns,
        prepare_ns=prepare_ns,
        forward_ns=forward_ns,
        sample_ns=sample_ns,
        output_ns=output_ns,
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        waiting=waiting,
        running=running,
        preempted=preempted,
        kv_blocks_used=kv_blocks_used,
        kv_blocks_total=kv_blocks_total,
        admission=Admission(admission),
        graph=graph,
        shares=tuple(
            Share(
                request_key(request_id),
                Phase.PREFILL if is_prefill else Phase.DECODE,
                scheduled,
                cached,
                context,
                output,
                recompute,
            )
            for request_id, is_prefill, scheduled, cached, context, output, recompute in shares
        ),
    )
