"""Who computes what in the next step.

Decodes come first, one token each; the rest of the token budget goes to
prefills, in order of arrival and in chunks where it is short. A request that
does not fit waits, and nobody passes it. Where a decode finds no KV block, the
youngest sequence gives up its blocks and is computed again later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from .config import EngineConfig
from .kv_cache import KvCache
from .metrics import EngineMetrics
from .observe import ADMITTED, NO_BUDGET, NO_KV_BLOCKS, NO_PLACE
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """What one sequence does in one step."""

    sequence: Sequence
    context: int  # its tokens in the cache before
    tokens: int  # computed now
    is_prefill: bool
    samples: bool  # whether its last token is computed, so that the next one can be chosen
    cached_tokens: int  # found in the prefix cache, when admitted in this step
    is_recompute: bool


@dataclass(slots=True)
class Plan:
    """One step: decodes, then prefill chunks."""

    budget: int  # tokens left
    work: list[Work] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    admission: int = ADMITTED  # why the first waiting request was left waiting


class Scheduler:
    """The queues, and who owns which KV blocks."""

    def __init__(self, config: EngineConfig, kv: KvCache, metrics: EngineMetrics) -> None:
        self.kv = kv
        self.running: list[Sequence] = []  # oldest first
        self.waiting: deque[Sequence] = deque()
        self._config = config
        self._metrics = metrics

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.running, self.waiting)

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or was aborted: its blocks are free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.kv.give_back(sequence.blocks)
            sequence.blocks = []
        else:
            self.waiting.remove(sequence)

    def plan(self, now_ns: int) -> Plan:
        """The next step, with the blocks it needs already taken."""
        plan = Plan(budget=self._config.max_num_batched_tokens)
        self._plan_decodes(plan)
        for sequence in self.running:
            if sequence.in_prefill and plan.budget:
                self._plan_prefill(plan, sequence)
        self._admit(plan, now_ns)
        plan.running, plan.waiting = len(self.running), len(self.waiting)
        return plan

    def computed(self, work: Work) -> None:
        """The step has run: what it wrote to the cache can be found by others from now on."""
        sequence = work.sequence
        sequence.computed += work.tokens
        size = self.kv.block_size
        for index in range(sequence.remembered, sequence.computed // size):
            sequence.serial = self.kv.remember(
                sequence.serial, sequence.token_ids, index * size, sequence.blocks[index]
            )
            sequence.remembered = index + 1

    def _plan_decodes(self, plan: Plan) -> None:
        for sequence in [s for s in self.running if not s.in_prefill]:
            while sequence in self.running and not self._has_block(sequence):
                self._preempt_youngest(plan)
            if sequence in self.running:
                plan.work.append(Work(sequence, sequence.computed, 1, False, True, 0, False))
                plan.budget -= 1

    def _has_block(self, sequence: Sequence) -> bool:
        """Whether its next token has a place in the cache, taking a block if need be."""
        if sequence.computed < len(sequence.blocks) * self.kv.block_size:
            return True
        taken = self.kv.take(1)
        sequence.blocks += taken or []
        return taken is not None

    def _preempt_youngest(self, plan: Plan) -> None:
        sequence = self.running.pop()
        self.kv.give_back(sequence.blocks)
        sequence.recompute_until = max(sequence.recompute_until, sequence.computed)
        sequence.blocks = []
        sequence.computed = sequence.remembered = sequence.serial = 0
        self.waiting.appendleft(sequence)
        plan.preempted += 1

    def _plan_prefill(self, plan: Plan, sequence: Sequence, cached_tokens: int = 0) -> None:
        context = sequence.computed
        tokens = min(sequence.prefill_until - context, plan.budget)
        plan.budget -= tokens
        plan.work.append(
            Work(
                sequence,
                context,
                tokens,
                is_prefill=True,
                samples=context + tokens == sequence.prefill_until,
                cached_tokens=cached_tokens,
                is_recompute=context < sequence.recompute_until,
            )
        )

    def _admit(self, plan: Plan, now_ns: int) -> None:
        while self.waiting:
            if len(self.running) >= self._config.max_num_seqs:
                plan.admission = NO_PLACE
            elif plan.budget == 0:
                plan.admission = NO_BUDGET
            elif plan.preempted or not self._place(self.waiting[0]):
                plan.admission = NO_KV_BLOCKS
            else:
                sequence = self.waiting.popleft()
                self.running.append(sequence)
                if not sequence.first_scheduled_ns:
                    sequence.first_scheduled_ns = now_ns
                    sequence.cached_tokens = sequence.computed
                self._plan_prefill(plan, sequence, cached_tokens=sequence.computed)
                continue
            return

    def _place(self, sequence: Sequence) -> bool:
        """Takes the blocks for all of its tokens, cached ones where the prefix cache has them."""
        kv = self.kv
        started_ns = time.monotonic_ns()
        found, serial = kv.find(sequence.token_ids)
        lookup_ns = time.monotonic_ns() - started_ns
        kv.share(found)
        missing = kv.blocks_for(len(sequence.token_ids)) - len(found)
        # One block to spare for each of those running, or they would soon preempt it again.
        taken = kv.take(missing) if missing + len(self.running) <= kv.available else None
        if taken is None:
            kv.give_back(found)
            return False
        self._metrics.prefix_looked_up(
            blocks=(len(sequence.token_ids) - 1) // kv.block_size,
            hits=len(found),
            lookup_ns=lookup_ns,
        )
        sequence.blocks = found + taken
        sequence.remembered, sequence.serial = len(found), serial
        sequence.computed = len(found) * kv.block_size
        sequence.prefill_until = len(sequence.token_ids)
        return True
