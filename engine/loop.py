"""The engine: requests in, steps, tokens out.

`submit` and `abort` may be called from any thread: they leave a command that
the next step takes first. All else belongs to the one thread that steps.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import NamedTuple

import torch

from .config import EngineConfig
from .kv_cache import KvCache
from .loader import LoadedModel
from .metrics import EngineMetrics
from .observe import StepObserver, StepReport, StepShare
from .prepare import prepare
from .request import EngineStopped, FinishReason, RequestRefused, SamplingParams, TokenOutput
from .sampler import generator, sample
from .scheduler import Plan, Scheduler, Work
from .sequence import Sequence

logger = logging.getLogger(__name__)

_PR_SET_NAME = 15
# A model that fails so many steps in a row will not recover.
_MOST_FAILURES = 3


class EngineStats(NamedTuple):
    """What the engine holds at this moment."""

    waiting: int
    running: int
    kv_blocks_used: int
    kv_blocks_total: int


_Choice = int | Exception | None  # a token, why there is none, or none was due


class _Computed(NamedTuple):
    """What came of a plan, and when."""

    choices: list[_Choice]  # one for each piece of work
    prepared_ns: int
    forwarded_ns: int
    sampled_ns: int


class Engine:
    """One model, its requests and its KV cache.

    `on_outputs` is called once a step, from the loop's thread, with the outputs of
    that step and of the requests that ended since the one before.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        observer: StepObserver,
        on_outputs: Callable[[list[TokenOutput]], None],
    ) -> None:
        model = loaded.model
        self.metrics = EngineMetrics()
        self._model = model
        self._config = config
        self._observer = observer
        self._on_outputs = on_outputs
        self._eos_token_ids = loaded.eos_token_ids
        longest = min(model.context_length, config.max_model_len or model.context_length)
        num_blocks = _num_blocks(config, model.kv_bytes_per_token, longest)
        # A sequence that has the whole cache to itself must fit, or preemption would never end.
        self.max_model_len = min(longest, num_blocks * config.block_size)
        self._kv = KvCache(
            num_blocks, config.block_size, enable_prefix_cache=config.enable_prefix_cache
        )
        self._scheduler = Scheduler(config, self._kv, self.metrics)
        model.allocate_kv(num_blocks, config.block_size)
        if config.threads is not None:
            torch.set_num_threads(config.threads)

        self._changed = threading.Condition()  # guards the six below
        self._commands: deque[Sequence | str] = deque()  # a new sequence, or an id to abort
        self._open: set[str] = set()
        self._submitted = 0
        self._closed = False
        self._abandon = False  # abort what is left, now
        self._failed = False

        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._outputs: list[TokenOutput] = []  # not yet handed out
        self._step_id = 0
        self._failures = 0

    @property
    def healthy(self) -> bool:
        """The loop is alive and has not failed."""
        return self._thread.is_alive() and not self._failed

    def stats(self) -> EngineStats:
        """From any thread; exact between steps."""
        kv, scheduler = self._kv, self._scheduler
        return EngineStats(
            len(scheduler.waiting),
            len(scheduler.running),
            kv.used,
            kv.num_blocks,
        )

    def submit(
        self, request_id: str, prompt_token_ids: ListOf[int], sampling: SamplingParams
    ) -> None:
        """Takes a request; raises RequestRefused where it can never run, EngineStopped where
        nothing can any more."""
        prompt = list(prompt_token_ids)
        if not prompt:
            raise RequestRefused("the prompt is empty")
        if len(prompt) >= self.max_model_len:
            raise RequestRefused(
                f"the prompt has {len(prompt)} tokens; with at least one to generate, this "
                f"model's context holds {self.max_model_len}"
            )
        if min(prompt) < 0 or max(prompt) >= self._model.vocab_size:
            raise RequestRefused("the prompt holds a token id outside the vocabulary")
        with self._changed:
            if self._closed:
                raise EngineStopped("the engine has failed" if self._failed else "shutting down")
            if request_id in self._open:
                raise RequestRefused(f"a request {request_id!r} is already open")
            self._submitted += 1
            sequence = Sequence(
                request_id=request_id,
                sampling=sampling,
                token_ids=prompt,
                prompt_tokens=len(prompt),
                last_length=min(len(prompt) + sampling.max_tokens, self.max_model_len),
                generator=generator(sampling, self._config.seed + self._submitted),
            )
            self._open.add(request_id)
            self._commands.append(sequence)
            self._changed.notify()

    def abort(self, request_id: str) -> None:
        """The request is gone, its blocks free, before the next step; a finished one is let be."""
        with self._changed:
            self._commands.append(request_id)
            self._changed.notify()

    def start(self) -> None:
        """Starts the loop's thread."""
        self._thread.start()

    def stop(self, *, drain: bool, deadline_s: float) -> None:
        """Takes no more requests; finishes those it has within the deadline if told to drain,
        aborts the rest, and ends the loop."""
        with self._changed:
            self._closed = True
            self._abandon = not drain
            self._changed.notify()
        if drain:
            self._thread.join(deadline_s)
            with self._changed:
                self._abandon = True
                self._changed.notify()
        self._thread.join(deadline_s)

    def step(self) -> bool:
        """Runs one step; False if there was nothing to run."""
        self._take_commands()
        if not self._scheduler:
            self._hand_out()
            return False
        self._step_id += 1
        start_ns = time.monotonic_ns()
        self._observer.step_started(self._step_id, start_ns)
        plan = self._scheduler.plan(start_ns)
        kv_blocks_used = self._kv.used
        prefill_tokens = sum(work.tokens for work in plan.work if work.is_prefill)
        decode_tokens = sum(work.tokens for work in plan.work) - prefill_tokens
        self._observer.step_scheduled(prefill_tokens, decode_tokens)
        scheduled_ns = time.monotonic_ns()
        computed = self._compute(plan)
        shares = [
            self._advance(work, choice)
            for work, choice in zip(plan.work, computed.choices, strict=True)
        ]
        self._hand_out()
        end_ns = time.monotonic_ns()
        report = StepReport(
            step_id=self._step_id,
            start_ns=start_ns,
            end_ns=end_ns,
            schedule_ns=scheduled_ns - start_ns,
            prepare_ns=computed.prepared_ns - scheduled_ns,
            forward_ns=computed.forwarded_ns - computed.prepared_ns,
            sample_ns=computed.sampled_ns - computed.forwarded_ns,
            output_ns=end_ns - computed.sampled_ns,
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            waiting=plan.waiting,
            running=plan.running,
            preempted=plan.preempted,
            kv_blocks_used=kv_blocks_used,
            kv_blocks_total=self._kv.num_blocks,
            admission=plan.admission,
            graph=False,
            shares=shares,
        )
        self._observer.step_finished(report)
        self.metrics.step_finished(report)
        return True

    def _run(self) -> None:
        """The loop's thread."""
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"engine-loop", 0, 0, 0)
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        try:
            while self.step() or self._wait():
                pass
        except Exception as error:
            logger.exception("the engine's loop has failed")
            self._fail(error)

    def _wait(self) -> bool:
        """Until there are commands; False if there will be none."""
        self._kv.check()
        if self._kv.used:
            raise AssertionError(f"{self._kv.used} KV blocks belong to nobody")
        self._observer.idle()
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._closed)
            return bool(self._commands) or not self._closed

    def _take_commands(self) -> None:
        with self._changed:
            commands, self._commands = self._commands, deque()
            if self._abandon:
                commands.extend(self._open)
        for command in commands:
            if isinstance(command, Sequence):
                self._scheduler.add(command)
            else:
                for sequence in [s for s in self._scheduler if s.request_id == command]:
                    self._end(sequence, (), "abort")

    def _compute(self, plan: Plan) -> _Computed:
        """Prepares, runs the model and samples. Where that fails, so do the requests in the step,
        and the loop goes on; unless it fails again and again."""
        marks: list[int] = []
        choices: list[_Choice]
        try:
            batch = prepare(plan.work, self._kv.block_size, self._model.device)
            marks.append(time.monotonic_ns())
            logits = self._model.forward(batch)
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
            marks.append(time.monotonic_ns())
            sampled = iter(sample(logits, [work.sequence for work in plan.work if work.samples]))
            choices = [next(sampled) if work.samples else None for work in plan.work]
            self._failures = 0
        except (RuntimeError, IndexError, MemoryError) as error:
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                raise
            logger.exception("step %d failed, and its requests with it", self._step_id)
            choices = [error] * len(plan.work)
        now_ns = time.monotonic_ns()
        prepared_ns, forwarded_ns = (*marks, now_ns, now_ns)[:2]
        return _Computed(choices, prepared_ns, forwarded_ns, now_ns)

    def _advance(self, work: Work, choice: _Choice) -> StepShare:
        """What the step means for one request."""
        sequence = work.sequence
        if isinstance(choice, Exception):
            self._end(sequence, (), "error", str(choice) or type(choice).__name__)
        else:
            self._scheduler.computed(work)
        if isinstance(choice, int):
            sequence.token_ids.append(choice)
            if choice in self._eos_token_ids and not sequence.sampling.ignore_eos:
                self._end(sequence, (choice,), "stop")
            elif len(sequence.token_ids) >= sequence.last_length:
                self._end(sequence, (choice,), "length")
            else:
                self._outputs.append(_output(sequence, (choice,)))
        return StepShare(
            request_id=sequence.request_id,
            is_prefill=work.is_prefill,
            scheduled_tokens=work.tokens,
            cached_tokens=work.cached_tokens,
            context_tokens=work.context,
            output_tokens=1 if isinstance(choice, int) else 0,
            is_recompute=work.is_recompute,
        )

    def _end(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        reason: FinishReason,
        error: str | None = None,
    ) -> None:
        self._scheduler.remove(sequence)
        with self._changed:
            self._open.discard(sequence.request_id)
        self.metrics.request_finished(reason)
        self._outputs.append(_output(sequence, token_ids, reason, error))

    def _hand_out(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            output_ns = time.monotonic_ns()
            self._on_outputs([output._replace(output_ns=output_ns) for output in outputs])

    def _fail(self, error: Exception) -> None:
        """The loop is dead: tell everyone who waits for it."""
        with self._changed:
            self._failed = self._closed = True
            abandoned = sorted(self._open)
            self._open.clear()
        now_ns = time.monotonic_ns()
        self._on_outputs(
            [
                TokenOutput(request_id, (), "error", now_ns, 0, 0, f"the engine failed: {error}")
                for request_id in abandoned
            ]
        )


def _output(
    sequence: Sequence,
    token_ids: tuple[int, ...],
    reason: FinishReason | None = None,
    error: str | None = None,
) -> TokenOutput:
    return TokenOutput(
        request_id=sequence.request_id,
        token_ids=token_ids,
        finish_reason=reason,
        output_ns=0,  # known when it is handed out
        first_scheduled_ns=sequence.first_scheduled_ns,
        cached_tokens=sequence.cached_tokens,
        error=error,
    )


def _num_blocks(config: EngineConfig, kv_bytes_per_token: int, longest: int) -> int:
    """As many as asked for, or as fit in kv_cache_bytes and could ever be used at once."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    fitting = config.kv_cache_bytes // (kv_bytes_per_token * config.block_size)
    useful = config.max_num_seqs * -(-longest // config.block_size)
    return max(1, min(fitting, useful))
