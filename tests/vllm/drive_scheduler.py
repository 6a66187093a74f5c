"""vLLM's own scheduler, driven without a model: run by an environment with vLLM and the plug-in.

`drive_scheduler.py MODEL_FOLDER SCENARIO` prints what the scheduler's ring held, one JSON document.
What a server on a CPU never does is had this way from the real classes: asynchronous scheduling,
speculative tokens. `bench` prints what the hooks cost a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import statistics
import time
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from dsagent.instrumentation.records import Step
from dsagent.instrumentation.ring import RingReader, find_rings
from dsagent.instrumentation.vllm import Instrumentation, install

BLOCK = 16
BATCH = 16


def make_scheduler(model: str, kind: type[Scheduler], **flags: Any) -> Scheduler:
    config = EngineArgs(
        model=model,
        max_model_len=1024,
        max_num_seqs=64,
        enforce_eager=True,
        block_size=BLOCK,
        enable_prefix_caching=False,
        **flags,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = kind is AsyncScheduler
    config.cache_config.num_gpu_blocks = 2000
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=2000, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return kind(config, cache, StructuredOutputManager(config), BLOCK, log_stats=True)


def add(scheduler: Scheduler, name: str, prompt: int, tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    params.update_from_generation_config({}, eos_token_id=2)
    scheduler.add_request(
        Request(
            request_id=name,
            prompt_token_ids=[(7 * i + len(name)) % 40000 + 3 for i in range(prompt)],
            sampling_params=params,
            pooling_params=None,
        )
    )


def computed(scheduler: Scheduler, output: Any, sampled: dict[str, int]) -> ModelRunnerOutput:
    """What the workers would say: so many tokens for each, none for an unfinished prefill."""
    ids = list(output.num_scheduled_tokens)
    tokens = [[11] * sampled.get(request_id, 0) for request_id in ids]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def overlapping(model: str) -> None:
    """Two requests, five steps, always one step ahead of the workers."""
    scheduler = make_scheduler(model, AsyncScheduler)
    add(scheduler, "a", 20, 4)
    add(scheduler, "b", 30, 4)
    ahead = scheduler.schedule()
    while ahead.total_num_scheduled_tokens:
        following = scheduler.schedule()
        # The step's id survives the way to the workers.
        copy = pickle.loads(pickle.dumps(ahead))
        assert copy.dsagent_step == ahead.dsagent_step
        sampled = dict.fromkeys(ahead.num_scheduled_tokens, 1)
        scheduler.update_from_output(ahead, computed(scheduler, ahead, sampled))
        ahead = following
    scheduler.update_from_output(ahead, computed(scheduler, ahead, {}))


def speculative(model: str) -> None:
    """Three drafts a step, of which one is accepted."""
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    scheduler = make_scheduler(model, Scheduler, speculative_config=draft)
    add(scheduler, "a", 20, 8)
    sampled = 1
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        scheduler.update_from_output(output, computed(scheduler, output, {"a": sampled}))
        scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[5, 6, 7]]))
        sampled = 2


def bench(model: str, steps: int) -> dict[str, Any]:
    """µs a step at a batch of 16, hooks in and out by turns within one scheduler."""
    scheduler = make_scheduler(model, Scheduler)
    for number in range(BATCH):
        add(scheduler, f"cmpl-{number:032x}-0-12345678", 64, 900)
    times: dict[bool, list[int]] = {True: [], False: []}
    hooked = (Scheduler.schedule, Scheduler.update_from_output)
    plain = tuple(function.__wrapped__ for function in hooked)
    for number in range(steps):
        on = bool(number // 8 % 2)
        schedule, update = hooked if on else plain
        begun = time.perf_counter_ns()
        output = schedule(scheduler)
        middle = time.perf_counter_ns()
        result = computed(scheduler, output, dict.fromkeys(output.num_scheduled_tokens, 1))
        again = time.perf_counter_ns()
        update(scheduler, output, result)
        spent = time.perf_counter_ns() - again + middle - begun
        times[on].append(spent)
    with_ns, without_ns = (statistics.median(times[on]) for on in (True, False))
    return {
        "batch": BATCH,
        "steps": steps,
        "without_us": round(without_ns / 1000, 1),
        "with_us": round(with_ns / 1000, 1),
        "hooks_us": round((with_ns - without_ns) / 1000, 1),
    }


def told(instrumentation: Instrumentation) -> list[dict[str, Any]]:
    writer = instrumentation.steps.ring.get()
    assert writer is not None
    (found,) = [ring for ring in find_rings(os.getpid()) if ring.inode == writer.inode]
    reader = RingReader.open(found)
    told = []
    for step in reader.read(10_000):
        assert isinstance(step, Step), step
        told.append({**dataclasses.asdict(step), "shares": [one._asdict() for one in step.shares]})
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("scenario", choices=("overlapping", "speculative", "bench"))
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    instrumentation = install()
    if arguments.scenario == "bench":
        print(json.dumps(bench(arguments.model, arguments.steps)))
        return
    {"overlapping": overlapping, "speculative": speculative}[arguments.scenario](arguments.model)
    document = {"steps": told(instrumentation), "failures": instrumentation.failures}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
