"""How vLLM's experts are loaded: the router's choices, counted in the worker in some of the steps.

Each layer's choices are kept in every EVERY_STEPS-th forward pass, not all layers' in the same one;
every few seconds they are counted and written as a tally. Nothing is kept while a CUDA graph is
captured, nor in code that is being compiled: what would be counted then is not what runs.
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

EVERY_STEPS = 32
WRITE_NS = 5_000_000_000
_MOST_KEPT = 16_384  # choices of one layer; beyond that they are counted at once
_MOST_LAYERS = 512
_FOR_EVER = 1 << 62
_MOST_FAILURES = 3  # fewer than switch the ring off, which others write, too


class _Layer:
    """One router; kept alive, so that its id stays its own."""

    def __init__(self, router: Any, index: int, label: str, experts: int) -> None:
        self.router = router
        self.index = index
        self.label = label
        self.experts = experts
        self.skip = index % EVERY_STEPS  # passes until the next that is counted
        self.since_ns = 0
        self.kept: list[Any] = []  # copies of choices, not counted yet
        self.choices = 0  # in those
        self.counts: Any = None  # of those before


class ExpertWatch:
    """Of one worker. Only the thread that executes calls it, which also writes the ring."""

    def __init__(self, ring: LazyRing, executing: Callable[[], tuple[int, int]]) -> None:
        """`ring`: the worker's own; `executing()`: its engine and rank, (0, 0) while it executes no
        step: what is routed then (at start-up, to find out how much memory there is) is made up."""
        self._ring = ring
        self._executing = executing
        self._layers: dict[int, _Layer] = {}
        self._failures = 0

    def hooks(self) -> tuple[Hook, ...]:
        """The method was abstract in 0.16, and its own in the class below; before that there was
        no such class, and such versions tell nothing of their experts."""
        package = "vllm.model_executor.layers.fused_moe.router"
        classes = (("fused_moe_router", "FusedMoERouter"), ("base_router", "BaseRouter"))
        return tuple(
            Hook(f"{package}.{module}", owner, "select_experts", self.wrap_select)
            for module, owner in classes
        )

    def wrap_select(self, original: AnyFunction) -> AnyFunction:
        torch: Any = sys.modules["torch"]
        is_compiling = torch.compiler.is_compiling

        layers = self._layers

        def select_experts(router: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = original(router, *args, **kwargs)
            if is_compiling():
                return chosen
            layer = layers.get(id(router))
            if layer is None:
                if self._failures == _MOST_FAILURES:
                    return chosen  # one that cannot be known would be tried in each pass
            elif layer.skip:
                layer.skip -= 1
                return chosen
            try:
                self._chosen(torch, layer or self._know(router), chosen[1])
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self._failed(layer)
            return chosen

        return select_experts

    def _failed(self, layer: _Layer | None) -> None:
        if self._failures < _MOST_FAILURES:
            self._failures += 1
            self._ring.count_failure()
        elif layer is not None:
            layer.skip = _FOR_EVER

    def _chosen(self, torch: Any, layer: _Layer, ids: Any) -> None:
        """`ids`: [tokens, experts chosen for each]."""
        if layer.skip:  # just got to know
            layer.skip -= 1
            return
        engine_id, rank = self._executing()
        if not engine_id or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        layer.skip = EVERY_STEPS - 1
        now_ns = monotonic_ns()
        if not layer.since_ns:
            layer.since_ns = now_ns
        elif now_ns - layer.since_ns > WRITE_NS:
            self._write(torch, layer, now_ns, engine_id, rank)
        layer.kept.append(ids.flatten().clone())  # vLLM may use the memory again
        layer.choices += ids.numel()
        if layer.choices > _MOST_KEPT:
            _settle(torch, layer)

    def _know(self, router: Any) -> _Layer:
        if len(self._layers) >= _MOST_LAYERS:
            raise ValueError("more routers than a model has")
        experts = getattr(router, "global_num_experts", None)
        if not isinstance(experts, int) or not 0 < experts <= MAX_COUNTS:
            raise ValueError("a router that does not say how many experts it has")
        # Whoever calls the router is the layer, and has a name.
        owner = sys._getframe(2).f_locals.get("self")
        index = len(self._layers)
        label = str(getattr(owner, "layer_name", None) or f"layer {index}")
        layer = self._layers[id(router)] = _Layer(router, index, label, experts)
        return layer

    def _write(self, torch: Any, layer: _Layer, now_ns: int, engine_id: int, rank: int) -> None:
        since_ns, layer.since_ns = layer.since_ns, now_ns
        _settle(torch, layer)
        counts, layer.counts = layer.counts, None
        if counts is None:
            return
        writer = self._ring.get()
        if writer is None:
            self._ring.count_unwritten()
        else:
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
                    counts=tuple(counts.tolist()),
                )
            )

    def close(self) -> None:
        self._layers.clear()


def _settle(torch: Any, layer: _Layer) -> None:
    """Counts what is kept."""
    kept, layer.kept, layer.choices = layer.kept, [], 0
    if kept:
        counts = _count(torch, torch.cat(kept), layer.experts)
        layer.counts = counts if layer.counts is None else layer.counts + counts


def _count(torch: Any, flat: Any, experts: int) -> Any:
    """How often each expert is in it. What is no expert, such as a padded token's -1, is passed
    over. On a GPU nothing is waited for."""
    if not flat.is_cuda:
        try:
            counts = torch.bincount(flat, minlength=experts)
        except RuntimeError:  # a negative one
            counts = torch.bincount(flat[flat >= 0], minlength=experts)
        return counts[:experts]
    counts = flat.new_zeros(experts + 1, dtype=torch.int64)
    places = torch.where((flat < 0) | (flat >= experts), experts, flat).long()
    return counts.scatter_add_(0, places, torch.ones_like(places))[:experts]
