"""The plug-in for vLLM: entry point `vllm.general_plugins`, loaded in each of its processes.

Hooks the front end, the scheduler and the workers, wherever they are; the rest
is found out by what is there, not by the version. Standard library only.
"""

from __future__ import annotations

import logging
from typing import Any

from dsagent.instrumentation.layout import Role
from dsagent.instrumentation.ring_lazy import LazyRing
from dsagent.instrumentation.vllm_drafts import DraftWatch
from dsagent.instrumentation.vllm_experts import ExpertWatch
from dsagent.instrumentation.vllm_patch import Hook, Patches
from dsagent.instrumentation.vllm_ranks import RankWatch
from dsagent.instrumentation.vllm_requests import RequestWatch
from dsagent.instrumentation.vllm_steps import SchedulerWatch

_vllm_log = logging.getLogger("dsagent")


class Instrumentation:
    """The hooks in this process. `remove` puts vLLM's own objects back and closes the rings."""

    def __init__(self) -> None:
        self.steps = SchedulerWatch()
        self.ranks = RankWatch()
        self.requests = RequestWatch()
        self.experts = ExpertWatch(self.ranks.ring, self.ranks.executing)
        self.drafts = DraftWatch(self.steps.ring, lambda: self.steps.engine_id)
        self.patches = Patches(
            (
                *hooks(self.steps, self.ranks, self.requests),
                *self.experts.hooks(),
                *self.drafts.hooks(),
            )
        )

    def open(self, role: Role) -> None:
        """Makes the ring of a role at once; to be called in the thread that will write it."""
        if role is Role.FRONTEND:
            self.requests.open()
        elif role is Role.SCHEDULER:
            self.steps.open()

    @property
    def rings(self) -> tuple[LazyRing, ...]:
        return self.requests.ring, self.steps.ring, self.ranks.ring

    @property
    def failures(self) -> int:
        """What went wrong in the hooks and was kept from vLLM."""
        return sum(ring.failures for ring in self.rings)

    def remove(self) -> None:
        if self in _installed:
            _installed.remove(self)
        self.patches.remove()
        self.requests.close()
        self.steps.close()
        self.ranks.close()
        self.experts.close()
        self.drafts.close()


def hooks(steps: SchedulerWatch, ranks: RankWatch, requests: RequestWatch) -> tuple[Hook, ...]:
    """Everything that is replaced. A module that a version does not have is never loaded."""
    scheduler = "vllm.v1.core.sched.scheduler"
    outputs = "vllm.v1.engine.output_processor"
    wrapper = "WorkerWrapperBase"
    return (
        Hook(scheduler, "Scheduler", "__init__", steps.wrap_init),
        Hook(scheduler, "Scheduler", "schedule", steps.wrap_schedule),
        Hook(scheduler, "Scheduler", "update_from_output", steps.wrap_update),
        # Moved between 0.11 and 0.16; before that the wrapper had none of its own.
        Hook("vllm.v1.worker.worker_base", wrapper, "execute_model", ranks.wrap_execute),
        Hook("vllm.worker.worker_base", wrapper, "execute_model", ranks.wrap_execute),
        Hook("vllm.v1.worker.gpu_worker", "Worker", "execute_model", ranks.wrap_execute),
        Hook("vllm.v1.worker.gpu_worker", "Worker", "sample_tokens", ranks.wrap_sample),
        Hook("starlette.applications", "Starlette", "__call__", requests.wrap_app),
        Hook("vllm.v1.engine.async_llm", "AsyncLLM", "add_request", requests.wrap_add),
        Hook(outputs, "OutputProcessor", "add_request", requests.wrap_register),
        Hook(outputs, "OutputProcessor", "process_outputs", requests.wrap_outputs),
        Hook(outputs, "OutputProcessor", "abort_requests", requests.wrap_abort),
    )


_installed: list[Instrumentation] = []  # at most one


def install() -> Instrumentation:
    """The hooks of this process; the same ones if called again."""
    if not _installed:
        instrumentation = Instrumentation()
        instrumentation.patches.install()
        _installed.append(instrumentation)
    return _installed[0]


def register(*_: Any) -> None:
    """What vLLM calls in each of its processes, sometimes more than once."""
    try:
        install()
    except Exception:  # noqa: BLE001  vLLM goes on without us
        _vllm_log.exception("not instrumented")
