"""The engine's own Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .kv_cache import KvCache

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_CACHE_SECONDS = tuple(0.001 * 2**power for power in range(10))


class EngineMetrics:
    """One engine's metrics, in a registry of their own. Written by the loop's thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        requests = Gauge(
            "dsagent_reference_requests",
            "Requests in the engine after the last step.",
            ("state",),
            registry=registry,
        )
        self._waiting = requests.labels("waiting")
        self._running = requests.labels("running")
        blocks = Gauge(
            "dsagent_reference_kv_blocks",
            "KV cache blocks: free, cached (free, but a prefix can still be hit), used.",
            ("state",),
            registry=registry,
        )
        self._free, self._cached, self._used = (
            blocks.labels(state) for state in ("free", "cached", "used")
        )
        tokens = Counter(
            "dsagent_reference_tokens",
            "Tokens computed as prefill, and tokens generated.",
            ("kind",),
            registry=registry,
        )
        self._prefill_tokens = tokens.labels("prefill")
        self._generated_tokens = tokens.labels("generated")
        self._finished = Counter(
            "dsagent_reference_requests_finished",
            "Requests that have ended, by finish reason.",
            ("reason",),
            registry=registry,
        )
        self._preemptions = Counter(
            "dsagent_reference_preemptions",
            "Sequences that gave up their KV blocks to be computed again.",
            registry=registry,
        )
        self._step_seconds = Histogram(
            "dsagent_reference_step_duration_seconds",
            "One step, from scheduling to handing out its tokens.",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self._cache_hits = Counter(
            "cache_hit",
            "Blocks of admitted prompts found in the cache.",
            ("cache_name", "operation"),
            registry=registry,
        ).labels("prefix", "lookup")
        self._cache_requests = Counter(
            "cache_request",
            "Blocks of admitted prompts looked for in the cache.",
            ("cache_name", "operation"),
            registry=registry,
        ).labels("prefix", "lookup")
        latency = Histogram(
            "cache_operation_latency_seconds",
            "One lookup of a whole prompt; a hit found at least one block.",
            ("cache_name", "result"),
            buckets=_CACHE_SECONDS,
            registry=registry,
        )
        self._cache_seconds = {
            hit: latency.labels("prefix", "hit" if hit else "miss") for hit in (True, False)
        }

    def prefix_looked_up(self, *, blocks: int, hits: int, lookup_ns: int) -> None:
        self._cache_requests.inc(blocks)
        self._cache_hits.inc(hits)
        self._cache_seconds[hits > 0].observe(lookup_ns / 1e9)

    def request_finished(self, reason: str) -> None:
        self._finished.labels(reason).inc()

    def step_finished(
        self, *, duration_ns: int, prefill_tokens: int, generated_tokens: int, preempted: int
    ) -> None:
        self._step_seconds.observe(duration_ns / 1e9)
        self._prefill_tokens.inc(prefill_tokens)
        self._generated_tokens.inc(generated_tokens)
        self._preemptions.inc(preempted)

    def holds(self, *, waiting: int, running: int, kv: KvCache) -> None:
        """What the engine holds now."""
        self._waiting.set(waiting)
        self._running.set(running)
        self._free.set(kv.free)
        self._cached.set(kv.cached)
        self._used.set(kv.used)
