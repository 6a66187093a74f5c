"""vLLM's scheduler, watched: a Step for each of its iterations in which something was scheduled.

Known by what it does, not by its version: `schedule` returns an object with
`num_scheduled_tokens`, which comes back in `update_from_output`. With
asynchronous scheduling others are scheduled in between, so pending steps are
kept by the identity of that object.
"""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic_ns
from typing import Any

from dsagent.instrumentation.context import random_id
from dsagent.instrumentation.layout import Role
from dsagent.instrumentation.records import Admission
from dsagent.instrumentation.ring_lazy import LazyRing
from dsagent.instrumentation.ring_writer import RingWriter
from dsagent.instrumentation.vllm_patch import AnyFunction

STEP_ATTRIBUTE = "dsagent_step"  # of the SchedulerOutput: engine id, step id; pickled with it
_MOST_PENDING = 64
_MOST_REMEMBERED = 16_384

# Columns: request ids; scheduled, cached, context tokens; is_prefill, is_recompute.
_Planned = tuple[list[str], list[int], list[int], list[int], list[bool], list[bool]]
# Of the head of a step: from prefill_tokens on, up to graph.
_Counts = tuple[int, int, int, int, int, int, int, int]


class SchedulerWatch:
    """Of one process. Only the engine's loop calls it."""

    def __init__(self) -> None:
        self.engine_id = random_id(64) >> 1 or 1  # fits a signed column
        self.ring = LazyRing(self._make_ring)
        self._step_id = 0
        # id of the SchedulerOutput → it, step id, begin, end of schedule, shares, counts
        self._pending: dict[int, tuple[Any, int, int, int, _Planned, _Counts]] = {}
        self._output_begun_ns = 0  # of the step before: the workers were free from then on
        self._chunks: dict[str, int] = {}  # unfinished prefill → tokens computed
        self._recompute: dict[str, int] = {}  # preempted → tokens that it had computed

    def _make_ring(self) -> RingWriter:
        return RingWriter(role=Role.SCHEDULER, engine_id=self.engine_id, vllm=True)

    # The wrappers: what vLLM raises goes through untouched, what we raise does not get out.

    def wrap_init(self, original: AnyFunction) -> AnyFunction:
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(scheduler, *args, **kwargs)
            try:
                self.open()
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self.ring.count_failure()

        return __init__

    def wrap_schedule(self, original: AnyFunction) -> AnyFunction:
        def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            begun_ns = monotonic_ns()
            try:
                self._begins(begun_ns)
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self.ring.count_failure()
            output = original(scheduler, *args, **kwargs)
            try:
                self._scheduled(scheduler, output, begun_ns, monotonic_ns())
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self.ring.count_failure()
            return output

        return schedule

    def wrap_update(self, original: AnyFunction) -> AnyFunction:
        def update_from_output(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            begun_ns = monotonic_ns()
            result = original(scheduler, *args, **kwargs)
            try:
                scheduled = args[0] if args else kwargs["scheduler_output"]
                computed = args[1] if len(args) > 1 else kwargs["model_runner_output"]
                self._finished(scheduled, computed, result, begun_ns)
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self.ring.count_failure()
            return result

        return update_from_output

    def open(self) -> None:
        """Makes the ring before the first step, so that who attaches to an idle engine finds it."""
        writer = self.ring.get()
        if writer is not None:
            writer.heartbeat(monotonic_ns())

    def _begins(self, now_ns: int) -> None:
        if not self._pending:  # else the step that the workers are at goes on
            writer = self.ring.get()
            if writer is not None:
                writer.step_started(self._step_id + 1, now_ns)

    def _scheduled(self, scheduler: Any, output: Any, begun_ns: int, ended_ns: int) -> None:
        if self.ring.get() is None:
            if getattr(output, "num_scheduled_tokens", None):
                self.ring.count_unwritten()
            return
        tokens: dict[str, int] = output.num_scheduled_tokens
        preempted = self._note_preempted(scheduler, output)
        if output.finished_req_ids and (self._chunks or self._recompute):
            for request_id in output.finished_req_ids:
                self._chunks.pop(request_id, None)
                self._recompute.pop(request_id, None)
        if not tokens:
            if not self._pending:
                self._idle(ended_ns)
            return
        self._step_id += 1
        setattr(output, STEP_ATTRIBUTE, (self.engine_id, self._step_id))
        shares, prefill_tokens = self._plan(scheduler.requests, tokens, output)
        waiting = _waiting(scheduler)
        blocks_total, blocks_free = _blocks(scheduler)
        scheduled = sum(tokens.values())
        counts = (
            prefill_tokens,
            scheduled - prefill_tokens,
            waiting,
            len(scheduler.running),
            preempted,
            blocks_total - blocks_free,
            blocks_total,
            _admission(scheduler, scheduled, preempted, blocks_free)
            if waiting
            else Admission.ADMITTED,
        )
        if len(self._pending) >= _MOST_PENDING:
            del self._pending[next(iter(self._pending))]
            self.ring.count_failure()
        self._pending[id(output)] = (output, self._step_id, begun_ns, ended_ns, shares, counts)

    def _plan(
        self, requests: dict[str, Any], tokens: dict[str, int], output: Any
    ) -> tuple[_Planned, int]:
        """Who is in the step with what, and how many of its tokens are prefill."""
        chunks, again = self._chunks, self._recompute
        context: list[int] = []
        cached = [0] * len(tokens)
        prefill = [False] * len(tokens)
        recompute = [False] * len(tokens)
        prefill_tokens = 0
        for request_id, count in tokens.items():
            request = requests[request_id]
            reached = request.num_computed_tokens  # schedule() has advanced it already
            before = reached - count
            if before < request.num_prompt_tokens or request_id in again:
                place = len(context)
                if request_id in again:
                    prefill[place] = recompute[place] = before < again[request_id]
                    if reached >= again[request_id]:
                        del again[request_id]
                prompt = request.num_prompt_tokens
                prefill[place] |= before < prompt
                if prefill[place]:
                    prefill_tokens += count
                if reached < prompt:
                    chunks[request_id] = reached
                else:
                    chunks.pop(request_id, None)
            context.append(before if before > 0 else 0)
        ids = list(tokens)
        for new in output.scheduled_new_reqs:
            cached[ids.index(new.req_id)] = new.num_computed_tokens
        return (ids, list(tokens.values()), cached, context, prefill, recompute), prefill_tokens

    def _note_preempted(self, scheduler: Any, output: Any) -> int:
        """How many were preempted in this call of schedule(), and what they had computed."""
        told: Collection[str] | None = getattr(output, "preempted_req_ids", None)
        fresh = self._first_in_queue(scheduler) if told is None else told
        if not fresh:
            return 0
        count = 0
        for request_id in fresh:
            request = scheduler.requests.get(request_id)
            if request is None:
                continue
            count += 1
            if len(self._recompute) >= _MOST_REMEMBERED:
                self._recompute.clear()
            computed = self._chunks.pop(request_id, None) or request.num_tokens - 1
            self._recompute[request_id] = max(self._recompute.get(request_id, 0), computed)
        return count

    def _first_in_queue(self, scheduler: Any) -> list[str]:
        """Older versions tell nobody, but put a preempted request first in the queue."""
        found = []
        for request in scheduler.waiting:
            if request.status.name != "PREEMPTED" or request.request_id in self._recompute:
                break
            found.append(request.request_id)
        return found

    def _finished(self, output: Any, computed: Any, result: Any, begun_ns: int) -> None:
        pending = self._pending.pop(id(output), None)
        if pending is None:
            return
        _, step_id, start_ns, scheduled_ns, shares, counts = pending
        # Before that the workers were at the step before: this one waited in their queue.
        forward_ns = min(max(scheduled_ns, self._output_begun_ns), begun_ns)
        self._output_begun_ns = begun_ns
        writer = self.ring.get()
        if writer is None:
            self.ring.count_unwritten()
            return
        ids, scheduled, cached, context, prefill, recompute = shares
        tokens = _sampled(result, ids)
        end_ns = monotonic_ns()
        writer.write_columns(
            (
                step_id, start_ns, end_ns, scheduled_ns - start_ns, forward_ns - scheduled_ns,
                begun_ns - forward_ns, 0, end_ns - begun_ns, *counts, _graph(computed),
            ),
            ids, scheduled, cached, context, tokens, prefill, recompute,
        )  # fmt: skip
        following = next(iter(self._pending.values()), None)
        if following is None:
            writer.idle(end_ns)
        else:
            writer.step_started(following[1], end_ns)

    def _idle(self, now_ns: int) -> None:
        writer = self.ring.get()
        if writer is not None:
            writer.idle(now_ns)

    def close(self) -> None:
        self._pending.clear()
        self.ring.close()


def _sampled(result: Any, ids: list[str]) -> list[int]:
    """How many tokens each of them was given; `result` is one object or one for each front end."""
    groups = list(result.values()) if isinstance(result, dict) else [result]
    if len(groups) == 1 and [one.request_id for one in groups[0].outputs] == ids:
        return [len(one.new_token_ids) for one in groups[0].outputs]
    counts = {one.request_id: len(one.new_token_ids) for each in groups for one in each.outputs}
    return [counts.get(request_id, 0) for request_id in ids]


def _waiting(scheduler: Any) -> int:
    """All that wait, whatever queues this version has for them."""
    counts = getattr(scheduler, "get_request_counts", None)
    return int(len(scheduler.waiting) if counts is None else counts()[1])


def _blocks(scheduler: Any) -> tuple[int, int]:
    """KV blocks in all, and free ones; the one that stands for none is not counted."""
    pool = getattr(scheduler.kv_cache_manager, "block_pool", None)
    if pool is None:
        return 0, 0
    return pool.num_gpu_blocks - 1, min(pool.get_num_free_blocks(), pool.num_gpu_blocks - 1)


def _admission(scheduler: Any, scheduled: int, preempted: int, blocks_free: int) -> Admission:
    """Why somebody still waits."""
    places = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
    if len(scheduler.running) >= places:
        return Admission.NO_PLACE
    if preempted:
        return Admission.NO_KV_BLOCKS
    if scheduled >= scheduler.max_num_scheduled_tokens:
        return Admission.NO_BUDGET
    first = next(iter(scheduler.waiting), None)
    size = getattr(scheduler, "block_size", 0)
    if first is not None and size and -(-first.num_tokens // size) > blocks_free:
        return Admission.NO_KV_BLOCKS
    return Admission.NO_BUDGET


def _graph(computed: Any) -> bool:
    """Whether a CUDA graph ran, where the workers say so."""
    stats = getattr(computed, "cudagraph_stats", None)
    return stats is not None and not str(stats.runtime_mode).endswith("NONE")
