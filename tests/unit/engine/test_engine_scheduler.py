from __future__ import annotations

from dsagent.engine.config import EngineConfig
from dsagent.engine.kv_cache import KvCache
from dsagent.engine.metrics import EngineMetrics
from dsagent.engine.observe import ADMITTED, NO_BUDGET, NO_KV_BLOCKS, NO_PLACE
from dsagent.engine.request import SamplingParams
from dsagent.engine.scheduler import Plan, Scheduler
from dsagent.engine.sequence import Sequence


def scheduler(
    *, blocks: int = 100, seqs: int = 4, budget: int = 64, prefix_cache: bool = True
) -> Scheduler:
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget)
    kv = KvCache(blocks, config.block_size, enable_prefix_cache=prefix_cache)
    return Scheduler(config, kv, EngineMetrics())


def sequence(name: str, prompt_tokens: int) -> Sequence:
    tokens = [sum(name.encode()) + index for index in range(prompt_tokens)]
    return Sequence(name, SamplingParams(), tokens, prompt_tokens, last_length=10_000)


def run(scheduler: Scheduler) -> Plan:
    """One step whose every sampled token is 0."""
    plan = scheduler.plan(now_ns=1)
    for work in plan.work:
        scheduler.computed(work)
        if work.samples:
            work.sequence.token_ids.append(0)
    return plan


def summary(plan: Plan) -> list[tuple[str, int, int, bool]]:
    return [(w.sequence.request_id, w.context, w.tokens, w.is_prefill) for w in plan.work]


def test_decodes_come_first_and_prefill_takes_what_is_left() -> None:
    it = scheduler(budget=64)
    it.add(sequence("a", 20))
    assert summary(run(it)) == [("a", 0, 20, True)]
    it.add(sequence("b", 100))
    assert summary(run(it)) == [("a", 20, 1, False), ("b", 0, 63, True)]
    plan = run(it)
    assert summary(plan) == [("a", 21, 1, False), ("b", 63, 37, True)]
    assert [work.samples for work in plan.work] == [True, True]
    assert summary(run(it)) == [("a", 22, 1, False), ("b", 100, 1, False)]


def test_the_first_one_waiting_says_why() -> None:
    it = scheduler(seqs=1)
    it.add(sequence("a", 5))
    assert run(it).admission == ADMITTED
    it.add(sequence("b", 5))
    plan = run(it)
    assert (plan.admission, plan.running, plan.waiting) == (NO_PLACE, 1, 1)

    it = scheduler(budget=16)
    it.add(sequence("a", 40))
    it.add(sequence("b", 5))
    assert run(it).admission == NO_BUDGET

    it = scheduler(blocks=4)
    it.add(sequence("a", 30))
    it.add(sequence("b", 30))
    plan = run(it)
    assert (plan.admission, plan.waiting) == (NO_KV_BLOCKS, 1)


def test_nobody_passes_a_request_that_does_not_fit() -> None:
    it = scheduler(blocks=4)
    for name, tokens in (("a", 30), ("b", 30), ("c", 3)):
        it.add(sequence(name, tokens))
    assert [name for name, *_ in summary(run(it))] == ["a"]


def test_a_shared_prefix_is_computed_once() -> None:
    it = scheduler()
    it.add(sequence("a", 40))
    run(it)
    it.add(sequence("a", 40))
    plan = run(it)
    assert summary(plan)[1] == ("a", 32, 8, True)
    assert plan.work[1].cached_tokens == 32
    assert it.running[0].blocks[:2] == it.running[1].blocks[:2]


def test_the_youngest_gives_way_and_is_computed_again() -> None:
    it = scheduler(blocks=5, prefix_cache=False)
    it.add(sequence("old", 31))
    run(it)
    it.add(sequence("young", 30))
    run(it)
    preempted = None
    for _ in range(40):
        plan = run(it)
        if plan.preempted:
            preempted = plan
            break
    assert preempted is not None
    assert [work.sequence.request_id for work in preempted.work] == ["old"]
    assert preempted.admission == NO_KV_BLOCKS
    young = it.waiting[0]
    assert young.request_id == "young" and not young.blocks and young.computed == 0
    it.remove(it.running[0])
    plan = run(it)
    assert [work.sequence for work in plan.work] == [young]
    assert plan.work[0].is_recompute and plan.work[0].is_prefill
    # All that it had written before is there again, and it goes on where it was.
    assert young.computed + 1 == len(young.token_ids)


def test_what_is_removed_leaves_no_blocks_behind() -> None:
    it = scheduler()
    waiting, running = sequence("w", 5), sequence("r", 40)
    it.add(running)
    run(it)
    it.add(waiting)
    it.remove(waiting)
    it.remove(running)
    assert len(it) == 0
    assert it.kv.used == 0
    it.kv.check()
