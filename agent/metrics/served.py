"""What engines say of themselves at /metrics, by whichever name they say it. A table.

One `Quantity` is one thing; engines, and their versions, call it differently.
The first name that an engine shows counts, summed over its labels: one
deployment may have several engines behind one address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsagent.agent.metrics.exposition import Scraped
from dsagent.agent.metrics.metric import Metric, MetricKind


@dataclass(frozen=True, slots=True)
class Spelling:
    """A name, and since when (or until when) which engine uses it."""

    name: str
    who: str
    # Only samples with one of these values of this label; "": all.
    label: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantity:
    """`mean`: summed over engines it would say nothing."""

    key: str
    kind: MetricKind
    unit: str
    description: str
    spellings: tuple[Spelling, ...]
    mean: bool = False

    @property
    def metric(self) -> Metric:
        return Metric(f"dsagent.served.{self.key}", self.kind, self.unit, self.description)


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        "requests.running",
        "gauge",
        "{request}",
        "Requests being worked on, as the engine says.",
        (
            Spelling("vllm:num_requests_running", "vLLM"),
            Spelling("sglang:num_running_reqs", "SGLang"),
            Spelling("llamacpp:requests_processing", "llama.cpp"),
        ),
    ),
    Quantity(
        "requests.waiting",
        "gauge",
        "{request}",
        "Requests waiting for a place, as the engine says.",
        (
            Spelling("vllm:num_requests_waiting", "vLLM"),
            Spelling("sglang:num_queue_reqs", "SGLang"),
            Spelling("llamacpp:requests_deferred", "llama.cpp"),
        ),
    ),
    Quantity(
        "kv_cache.usage",
        "gauge",
        "1",
        "Share of the KV cache in use, as the engine says; the mean over its engines.",
        (
            Spelling("vllm:kv_cache_usage_perc", "vLLM since 0.9"),
            Spelling("vllm:gpu_cache_usage_perc", "vLLM up to 0.10"),
            Spelling("sglang:token_usage", "SGLang"),
            Spelling("llamacpp:kv_cache_usage_ratio", "llama.cpp up to 2025"),
        ),
        mean=True,
    ),
    Quantity(
        "requests.preempted",
        "counter",
        "{request}",
        "Requests taken out of the batch to be computed again, as the engine says.",
        (
            Spelling("vllm:num_preemptions_total", "vLLM"),
            Spelling("sglang:num_retracted_requests_total", "SGLang since 2025"),
        ),
    ),
    Quantity(
        "tokens.prompt",
        "counter",
        "{token}",
        "Tokens of prompts, as the engine says.",
        (
            Spelling("vllm:prompt_tokens_total", "vLLM"),
            Spelling("sglang:prompt_tokens_total", "SGLang"),
            Spelling("llamacpp:prompt_tokens_total", "llama.cpp, without those from its cache"),
        ),
    ),
    Quantity(
        "tokens.generated",
        "counter",
        "{token}",
        "Tokens generated, as the engine says.",
        (
            Spelling("vllm:generation_tokens_total", "vLLM"),
            Spelling("sglang:generation_tokens_total", "SGLang"),
            Spelling("llamacpp:tokens_predicted_total", "llama.cpp"),
        ),
    ),
    Quantity(
        "requests.finished",
        "counter",
        "{request}",
        "Requests that ended well, as the engine says.",
        (
            Spelling("vllm:request_success_total", "vLLM", "finished_reason", ("stop", "length")),
            Spelling("sglang:num_requests_total", "SGLang"),
        ),
    ),
    Quantity(
        "steps",
        "counter",
        "{step}",
        "Batches that were computed, as the engine says.",
        (Spelling("llamacpp:n_decode_total", "llama.cpp"),),
    ),
    Quantity(
        "steps.yielding",
        "counter",
        "{step}",
        "Batches that yielded at least one token, as the engine says.",
        (Spelling("vllm:iteration_tokens_total_count", "vLLM"),),
    ),
)
NAMES = frozenset(spelling.name for quantity in QUANTITIES for spelling in quantity.spellings)
SERVED_METRICS = tuple(quantity.metric for quantity in QUANTITIES)


def quantities(samples: Iterable[Scraped]) -> dict[str, float]:
    """key → value, of the quantities that these samples tell."""
    by_name: dict[str, list[Scraped]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    found = {}
    for quantity in QUANTITIES:
        for spelling in quantity.spellings:
            values = [
                sample.value
                for sample in by_name.get(spelling.name, ())
                if not spelling.label or _wanted(sample.labels, spelling)
            ]
            if values:
                total = sum(values)
                found[quantity.key] = total / len(values) if quantity.mean else total
                break
    return found


def _wanted(labels: Mapping[str, str], spelling: Spelling) -> bool:
    return labels.get(spelling.label) in spelling.values
