"""The plug-in in a real vLLM server: exact records, reconciled with vLLM's own counts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from watched import Watched, at_once

from dsagent.agent.host.target import resolve
from dsagent.instrumentation.records import Admission, Phase, RequestRecord
from dsagent.instrumentation.ring import Role

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"
BUDGET = 256  # tokens a step


def completion(served: Watched, prompt: str, tokens: int, **more: Any) -> RequestRecord:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
    reply = served.server.post("/v1/completions", body)
    record = served.record(reply["id"])
    assert record.prompt_tokens == reply["usage"]["prompt_tokens"]
    assert record.output_tokens == reply["usage"]["completion_tokens"]
    return record


def test_installing_it_changes_nothing_else(plugged: Any) -> None:
    added = plugged.after - plugged.before
    assert plugged.before <= plugged.after
    assert len(added) == 1
    assert added.pop().startswith("dsagent @ file:")


def test_any_process_of_the_server_leads_to_it(served: Watched) -> None:
    completion(served, "Once", 1)  # the worker makes its ring with the first step
    served.read()
    assert set(served.pids) == {Role.FRONTEND, Role.SCHEDULER, Role.RANK}
    assert len(set(served.pids.values())) == 3
    for pid in served.pids.values():
        target = resolve(pid)
        assert target.pid == served.server.pid
        assert (target.engine, target.service_name) == ("vllm", "vllm")
        assert set(served.pids.values()) - {target.pid} <= set(target.children)


def test_a_reply_sent_whole(served: Watched) -> None:
    record = completion(served, "The capital of France is", 6, temperature=0)
    steps = served.shares(record)
    assert [share.phase for _, share in steps] == [Phase.PREFILL, *[Phase.DECODE] * 5]
    assert [share.output_tokens for _, share in steps] == [1] * 6
    assert [share.context_tokens for _, share in steps] == [0, 5, 6, 7, 8, 9]
    assert [share.scheduled_tokens for _, share in steps] == [5, 1, 1, 1, 1, 1]
    assert (record.operation, record.model, record.error) == ("text_completion", "tiny", None)
    assert (record.max_tokens, record.temperature, record.finish_reason) == (6, 0.0, "length")
    moments = [
        record.received_ns, record.tokenised_ns, record.queued_ns, record.first_scheduled_ns,
        record.first_token_ns, record.finished_ns, record.first_sent_ns,
    ]  # fmt: skip
    assert moments == sorted(moments)  # type: ignore[type-var]
    assert record.sent_ns >= (record.first_sent_ns or 0)
    first, last = steps[0][0], steps[-1][0]
    assert first.start_ns <= (record.first_scheduled_ns or 0) <= first.end_ns
    assert first.forward_end_ns <= (record.first_token_ns or 0) <= first.end_ns
    assert last.forward_end_ns <= (record.finished_ns or 0) <= last.end_ns


def test_a_stream_as_its_client_sees_it(served: Watched) -> None:
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    reply = served.stream("/v1/chat/completions", body, traceparent=TRACEPARENT)
    record = served.record(reply.id)
    assert (record.trace_id, record.parent_span_id, record.sampled) == (TRACE_ID, SPAN_ID, True)
    assert record.operation == "chat"
    assert record.prompt_tokens == reply.usage["prompt_tokens"]
    assert record.output_tokens == reply.usage["completion_tokens"]
    assert record.first_sent_ns is not None
    assert reply.sent_ns < record.received_ns
    # The moment of sending is taken when the server has sent: the client may have it by then.
    assert record.received_ns < (record.first_token_ns or 0) < record.first_sent_ns
    assert (record.first_token_ns or 0) < reply.first_ns
    assert record.first_sent_ns < reply.last_ns
    assert record.first_sent_ns < record.sent_ns
    (opened,) = [one for one in served.opened if one.request_key == record.request_key]
    assert (opened.request_id, opened.trace_id) == (record.request_id, TRACE_ID)


def test_a_long_prompt_in_chunks(served: Watched) -> None:
    record = completion(served, "word " * 600, 2)
    shares = [share for _, share in served.shares(record)]
    assert [share.scheduled_tokens for share in shares] == [BUDGET, BUDGET, 601 - 2 * BUDGET, 1]
    assert [share.context_tokens for share in shares] == [0, BUDGET, 2 * BUDGET, 601]
    assert [share.output_tokens for share in shares] == [0, 0, 1, 1]
    assert [share.phase for share in shares] == [Phase.PREFILL] * 3 + [Phase.DECODE]
    again = completion(served, "word " * 600, 1)
    first = served.shares(again)[0][1]
    assert first.cached_tokens == first.context_tokens == again.cached_tokens > 0


def test_many_at_once(served: Watched) -> None:
    replies = at_once([lambda n=n: completion(served, f"Number {n} is", 4 + n) for n in range(6)])
    for record in replies:
        assert (
            sum(share.output_tokens for _, share in served.shares(record)) == record.output_tokens
        )
    assert any(len(step.shares) > 1 for step in served.steps)
    for step in served.steps:
        by_phase = dict.fromkeys(Phase, 0)
        for share in step.shares:
            by_phase[share.phase] += share.scheduled_tokens
        assert (step.prefill_tokens, step.decode_tokens) == tuple(by_phase.values())
        assert step.prefill_tokens + step.decode_tokens <= BUDGET
        assert 0 < step.kv_blocks_used <= step.kv_blocks_total == 9


def test_steps_follow_one_another_and_the_worker_agrees(served: Watched) -> None:
    completion(served, "And then", 3)
    served.until(lambda: len(served.ranks) == len(served.steps), "the worker's steps")
    assert [step.step_id for step in served.steps] == list(range(1, len(served.steps) + 1))
    assert [rank.step_id for rank in served.ranks] == [step.step_id for step in served.steps]
    for before, after in pairwise(served.steps):
        assert before.end_ns <= after.start_ns
    for step, rank in zip(served.steps, served.ranks, strict=True):
        assert rank.engine_id == step.engine_id
        assert step.forward_start_ns <= rank.start_ns < rank.end_ns <= step.forward_end_ns
        assert (step.pid, rank.pid) == (served.pids[Role.SCHEDULER], served.pids[Role.RANK])


def test_a_client_that_leaves(served: Watched) -> None:
    body = {"prompt": "A very long story:", "max_tokens": 400, "ignore_eos": True}
    reply = served.stream("/v1/completions", body, leave_after=3)
    record = served.record(reply.id)
    assert (record.finish_reason, record.error) == ("abort", "client_disconnect")
    assert 3 <= record.output_tokens < 400
    served.until(lambda: served.server.metrics()["vllm:num_requests_running"] == 0, "idle")


def test_several_prompts_and_samples_in_one_call(served: Watched) -> None:
    body = {"prompt": ["One", "Two"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    call = served.server.post("/v1/completions", body, {"traceparent": TRACEPARENT})
    ids = [f"{sample}_{call['id']}-{prompt}" for prompt in (0, 1) for sample in (0, 1)]
    records = [served.record(request_id) for request_id in ids]
    assert {record.trace_id for record in records} == {TRACE_ID}
    assert len({record.span_id for record in records}) == 4
    assert sum(record.output_tokens for record in records) == call["usage"]["completion_tokens"]
    assert [record.finish_reason for record in records] == ["length"] * 4


def test_a_call_that_is_refused(served: Watched) -> None:
    reply = served.server.post("/v1/completions", {"prompt": "word " * 2000, "max_tokens": 1})
    assert reply["status"] == 400
    refused = served.until(
        lambda: [r for r in served.closed if r.error == "invalid_request"], "the refusal"
    )
    assert [(r.output_tokens, r.queued_ns) for r in refused] == [(0, None)]


def test_what_was_preempted_is_computed_again(served: Watched) -> None:
    """Four requests of two blocks each nearly fill the 9, others wait; when those four need a
    third, some must go."""
    replies = at_once(
        [lambda n=n: completion(served, f"{n} " + "word " * 248, 40) for n in range(6)]
    )
    preempted = sum(step.preempted for step in served.steps)
    assert preempted > 0
    counted = served.server.metrics()["vllm:num_preemptions_total"]
    assert preempted == counted
    again = [
        (step, share)
        for record in replies
        for step, share in served.shares(record)
        if share.recompute
    ]
    assert again
    assert all(share.phase is Phase.PREFILL for _, share in again)
    waiting = [step.admission for step in served.steps if step.waiting]
    assert Admission.NO_KV_BLOCKS in waiting
    assert all(step.admission is Admission.ADMITTED for step in served.steps if not step.waiting)
    for record in replies:
        assert (
            sum(share.output_tokens for _, share in served.shares(record)) == record.output_tokens
        )


def test_the_counts_are_vllms_own(served: Watched) -> None:
    """All since the start: steps, tokens in and out, and what the prefix cache held."""
    completion(served, "In the end", 5)

    def ours() -> dict[str, float]:
        first = {r.request_key: r for r in served.closed if r.first_token_ns is not None}
        return {
            "vllm:iteration_tokens_total_count": sum(
                any(share.output_tokens for share in step.shares) for step in served.steps
            ),
            "vllm:generation_tokens_total": sum(
                share.output_tokens for step in served.steps for share in step.shares
            ),
            "vllm:prompt_tokens_total": sum(r.prompt_tokens or 0 for r in first.values()),
            "vllm:request_success_total": sum(
                r.finish_reason in ("stop", "length") for r in served.closed
            ),
        }

    def equal() -> bool:
        served.read()
        theirs = served.server.metrics()
        return all(theirs[name] == value for name, value in ours().items())

    try:
        served.until(equal, "equal counts")
    except AssertionError as error:
        theirs = served.server.metrics()
        raise AssertionError({name: (ours()[name], theirs[name]) for name in ours()}) from error
    chunks_only = [s for s in served.steps if not any(share.output_tokens for share in s.shares)]
    assert chunks_only
    assert served.server.metrics()["vllm:iteration_tokens_total_count"] + len(chunks_only) == len(
        served.steps
    )


def test_no_hook_failed_and_nothing_was_lost(served: Watched) -> None:
    served.read()
    for reader in served.readers:
        health = reader.health()
        assert (health.failures, health.unwritten, health.switched_off) == (0, 0, False)
        assert reader.counters.uncounted_loss == 0
        assert (reader.counters.lapped, reader.counters.rejected) == (0, 0)
    assert "dsagent" not in served.server.tail()
