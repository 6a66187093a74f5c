"""The engine's own Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from .observe import StepReport

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_CACHE_SECONDS = tuple(0.001 * 2**power for power in range(10))


class EngineMetrics:
    """One engine's metrics, in a registry of their own. Written by the loop's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, labels, registry=self.registry)

        def seconds(name: str, meaning: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, meaning, labels, buckets=bounds, registry=self.registry)

        tokens = counter(
            "dsagent_reference_tokens", "Tokens computed as prefill, and tokens generated.", "kind"
        )
        self._prefill, self._generated = tokens.labels("prefill"), tokens.labels("generated")
        self._finished = counter(
            "dsagent_reference_requests_finished",
            "Requests that have ended, by finish reason.",
            "reason",
        )
        self._preemptions = counter(
            "dsagent_reference_preemptions",
            "Sequences that gave up their KV blocks to be computed again.",
        )
        self._step_seconds = seconds(
            "dsagent_reference_step_duration_seconds",
            "One step, from scheduling to handing out its tokens.",
            _STEP_SECONDS,
        )
        cache = ("cache_name", "operation")
        hits = counter("cache_hit", "Blocks of admitted prompts found in the cache.", *cache)
        asked = counter(
            "cache_request", "Blocks of admitted prompts looked for in the cache.", *cache
        )
        self._cache_hits = hits.labels("prefix", "lookup")
        self._cache_requests = asked.labels("prefix", "lookup")
        latency = seconds(
            "cache_operation_latency_seconds",
            "One lookup of a whole prompt; a hit found at least one block.",
            _CACHE_SECONDS,
            "cache_name",
            "result",
        )
        self._hit_seconds, self._miss_seconds = (
            latency.labels("prefix", result) for result in ("hit", "miss")
        )

    def prefix_looked_up(self, *, blocks: int, hits: int, lookup_ns: int) -> None:
        self._cache_requests.inc(blocks)
        self._cache_hits.inc(hits)
        (self._hit_seconds if hits else self._miss_seconds).observe(lookup_ns / 1e9)

    def request_finished(self, reason: str) -> None:
        self._finished.labels(reason).inc()

    def step_finished(self, step: StepReport) -> None:
        self._step_seconds.observe((step.end_ns - step.start_ns) / 1e9)
        self._prefill.inc(step.prefill_tokens)
        self._generated.inc(sum(share.output_tokens for share in step.shares))
        self._preemptions.inc(step.preempted)
