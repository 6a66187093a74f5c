"""vLLM's workers, watched: a RankStep for each execution of a step, and the step that runs now.

The step's id comes with the SchedulerOutput. Newer versions execute and sample
in two calls: the step lasts until the second has returned.
"""

from __future__ import annotations

import os
import threading
from time import monotonic_ns
from typing import Any

from dsagent.instrumentation.layout import Role
from dsagent.instrumentation.records import RankStep
from dsagent.instrumentation.ring_lazy import LazyRing
from dsagent.instrumentation.ring_writer import RingWriter
from dsagent.instrumentation.vllm_patch import AnyFunction
from dsagent.instrumentation.vllm_steps import STEP_ATTRIBUTE


class RankWatch:
    """Of one process, that is of one worker. Only the thread that executes calls it."""

    def __init__(self) -> None:
        self.ring = LazyRing(self._make_ring)
        self._engine_id = 0
        self._rank = 0
        self._executing = False  # a wrapper of a worker calls the worker
        self._samples = False  # there is a second call
        self._executed: tuple[int, int, int] | None = None  # step id, begin, end: not told yet
        self._now: tuple[int, int] = (0, 0)  # step id, begin

    def _make_ring(self) -> RingWriter:
        return RingWriter(role=Role.RANK, engine_id=self._engine_id, vllm=True)

    def wrap_execute(self, original: AnyFunction) -> AnyFunction:
        def execute_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                ours = self._begins(worker, args[0] if args else kwargs.get("scheduler_output"))
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self.ring.count_failure()
                ours = False
            if not ours:
                return original(worker, *args, **kwargs)
            result = None
            try:
                result = original(worker, *args, **kwargs)
            finally:
                try:
                    self._has_executed(more=result is None and self._samples)
                except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                    self.ring.count_failure()
            return result

        return execute_model

    def wrap_sample(self, original: AnyFunction) -> AnyFunction:
        self._samples = True

        def sample_tokens(worker: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(worker, *args, **kwargs)
            finally:
                try:
                    self._tell(monotonic_ns())
                except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                    self.ring.count_failure()

        return sample_tokens

    def executing(self) -> tuple[int, int]:
        """Engine and rank while a step is executed; (0, 0) otherwise."""
        return (self._engine_id, self._rank) if self._executing else (0, 0)

    def _begins(self, worker: Any, output: Any) -> bool:
        """Whether this call is a step's, and the outermost."""
        step = getattr(output, STEP_ATTRIBUTE, None)
        if step is None or self._executing:
            return False
        self._tell(None)
        if not self._engine_id:
            self._engine_id, rank = step[0], getattr(worker, "rank", 0)
            self._rank = rank if isinstance(rank, int) else 0
        writer = self.ring.get()
        if writer is None:
            self.ring.count_unwritten()
            return False
        self._now = step[1], monotonic_ns()
        self._executing = True
        writer.step_started(*self._now)
        return True

    def _has_executed(self, *, more: bool) -> None:
        self._executing = False
        end_ns = monotonic_ns()
        self._executed = (*self._now, end_ns)
        if not more:
            self._tell(end_ns)

    def _tell(self, end_ns: int | None) -> None:
        """The step that was executed has ended, if there is one: without a second call, then."""
        if self._executed is None:
            return
        step_id, start_ns, executed_ns = self._executed
        self._executed = None
        writer = self.ring.get()
        if writer is not None:
            writer.write(
                RankStep(
                    engine_id=self._engine_id,
                    step_id=step_id,
                    rank=self._rank,
                    pid=os.getpid(),
                    tid=threading.get_native_id(),
                    start_ns=start_ns,
                    end_ns=end_ns or executed_ns,
                )
            )
            writer.idle(end_ns or executed_ns)
        else:
            self.ring.count_unwritten()

    def close(self) -> None:
        self.ring.close()
