"""How vLLM's experts are loaded: the router's choices, counted in the worker in some of the steps.

Every EVERY_STEPS-th forward pass each layer's choices are counted, by one small tensor operation
on the device where they are; a few seconds apart the counts are written as tallies. Nothing is
counted while a CUDA graph is captured, nor in code that is being compiled: what would be counted
then is not what runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from dsagent.instrumentation.ring_lazy import LazyRing
from dsagent.instrumentation.tally import MAX_COUNTS, Tally, What
from dsagent.instrumentation.vllm_patch import AnyFunction, Hook

EVERY_STEPS = 16
WRITE_NS = 2_000_000_000
_MOST_LAYERS = 512
_MOST_FAILURES = 10


class _Layer:
    """One router; kept alive, so that its id stays its own."""

    def __init__(self, router: Any, index: int, label: str, experts: int) -> None:
        self.router = router
        self.index = index
        self.label = label
        self.experts = experts
        self.counts: Any = None  # a tensor of whole numbers, where the choices are


class ExpertWatch:
    """Of one worker. Only the thread that executes calls it, which also writes the ring."""

    def __init__(self, ring: LazyRing, executing: Callable[[], tuple[int, int]]) -> None:
        """`ring`: the worker's own; `executing()`: its engine and rank, (0, 0) while it executes no
        step: what is routed then (at start-up, to find out how much memory there is) is made up."""
        self._ring = ring
        self._executing = executing
        self._layers: dict[int, _Layer] = {}
        self._pass = 0
        self._counting = False
        self._since_ns = 0
        self._failures = 0

    def hooks(self) -> tuple[Hook, ...]:
        """Versions without such a class tell nothing of their experts."""
        module = "vllm.model_executor.layers.fused_moe.router.fused_moe_router"
        return (Hook(module, "FusedMoERouter", "select_experts", self.wrap_select),)

    def wrap_select(self, original: AnyFunction) -> AnyFunction:
        torch: Any = sys.modules["torch"]
        is_compiling = torch.compiler.is_compiling

        def select_experts(router: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = original(router, *args, **kwargs)
            if not is_compiling():
                try:
                    self._chosen(torch, router, chosen[1])
                except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                    self._failed()
            return chosen

        return select_experts

    def _failed(self) -> None:
        self._ring.count_failure()
        self._failures += 1

    def _chosen(self, torch: Any, router: Any, ids: Any) -> None:
        """`ids`: [tokens, experts chosen for each]."""
        engine_id, rank = self._executing()
        if not engine_id or self._failures >= _MOST_FAILURES:
            return
        layer = self._layers.get(id(router))
        if layer is None:
            layer = self._know(router)
            if layer is None:
                return
        if layer.index == 0:
            self._pass += 1
            self._counting = self._pass % EVERY_STEPS == 1
            if self._counting and ids.is_cuda and torch.cuda.is_current_stream_capturing():
                self._counting = False
            now_ns = monotonic_ns()
            if now_ns - self._since_ns > WRITE_NS:
                self._write(now_ns, engine_id, rank)
        if not self._counting:
            return
        flat = ids.flatten()
        if layer.counts is None:
            layer.counts = flat.new_zeros(layer.experts + 1, dtype=torch.int64)
        # The last place is for what is no expert: a padded token's -1.
        places = torch.where((flat < 0) | (flat >= layer.experts), layer.experts, flat).long()
        layer.counts.scatter_add_(0, places, torch.ones_like(places))

    def _know(self, router: Any) -> _Layer | None:
        if len(self._layers) >= _MOST_LAYERS:
            return None
        experts = getattr(router, "global_num_experts", None)
        if not isinstance(experts, int) or not 0 < experts <= MAX_COUNTS:
            raise ValueError("a router that does not say how many experts it has")
        # Whoever calls the router is the layer, and has a name.
        owner = sys._getframe(3).f_locals.get("self")
        index = len(self._layers)
        label = str(getattr(owner, "layer_name", None) or f"layer {index}")
        layer = self._layers[id(router)] = _Layer(router, index, label, experts)
        return layer

    def _write(self, now_ns: int, engine_id: int, rank: int) -> None:
        since_ns, self._since_ns = self._since_ns, now_ns
        if not since_ns:
            return
        writer = self._ring.get()
        for layer in self._layers.values():
            if layer.counts is None:
                continue
            counts, layer.counts = layer.counts.tolist()[:-1], None
            if writer is not None:
                writer.write(
                    Tally(
                        engine_id=engine_id,
                        pid=os.getpid(),
                        what=What.EXPERT_TOKENS,
                        index=layer.index,
                        rank=rank,
                        start_ns=since_ns,
                        end_ns=now_ns,
                        label=layer.label,
                        counts=tuple(counts),
                    )
                )

    def close(self) -> None:
        self._layers.clear()
