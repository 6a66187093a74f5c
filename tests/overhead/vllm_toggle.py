"""Put into the environment of a vLLM server by bench_vllm_hooks.py, as a plug-in of its own.

In the engine core it takes dsagent's hooks of the scheduler out and in again every 8 steps (the
workers' follow: without a step's id they do nothing), times each step, and writes how long they
took to DSAGENT_TOGGLE_FILE, one JSON document a line: [hooked, nanoseconds, requests running].
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from dsagent.instrumentation.vllm import install
from dsagent.instrumentation.vllm_patch import Hook, Patches

BLOCK_STEPS = 8


def timed(original: Callable[..., Any]) -> Callable[..., Any]:
    out = open(os.environ["DSAGENT_TOGGLE_FILE"], "a", encoding="utf-8")  # noqa: SIM115
    taken: list[tuple[bool, int, int]] = []

    def step(core: Any) -> Any:
        from vllm.v1.core.sched.scheduler import Scheduler

        scheduler: Any = Scheduler
        if "schedule" not in kept:
            for name in ("schedule", "update_from_output"):
                stand_in = scheduler.__dict__[name]
                kept[name] = (stand_in.__wrapped__, stand_in)
        hooked = bool(counter[0] // BLOCK_STEPS % 2)
        for name, pair in kept.items():
            setattr(scheduler, name, pair[hooked])
        begun_ns = time.perf_counter_ns()
        result = original(core)
        spent_ns = time.perf_counter_ns() - begun_ns
        if result[1]:
            counter[0] += 1
            taken.append((hooked, spent_ns, len(core.scheduler.running)))
            if len(taken) == 64:
                out.writelines(json.dumps(one) + "\n" for one in taken)
                out.flush()
                taken.clear()
        return result

    counter = [0]
    kept: dict[str, tuple[Any, Any]] = {}
    return step


def register() -> None:
    install()
    Patches([Hook("vllm.v1.engine.core", "EngineCore", "step", timed)]).install()
