"""Metrics of vLLM that are called otherwise now, or are no more.

vLLM's policy: deprecated in one minor version, hidden in the next (shown by
--show-hidden-metrics-for-version), gone in the one after. The dates are those
of its own release notes; what is here was checked in the scrapes of servers
before and after, or in its source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rename:
    """`new` is empty where nothing took its place; `how` says what to do then, or why."""

    old: str
    new: str
    how: str


RENAMES = (
    Rename("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", "renamed in vLLM 0.9"),
    Rename(
        "vllm:gpu_prefix_cache_queries",
        "vllm:prefix_cache_queries",
        "renamed in vLLM 0.9",
    ),
    Rename("vllm:gpu_prefix_cache_hits", "vllm:prefix_cache_hits", "renamed in vLLM 0.9"),
    Rename(
        "vllm:time_per_output_token_seconds",
        "vllm:inter_token_latency_seconds",
        "the same observations; for the mean of a whole request take "
        "vllm:request_time_per_output_token_seconds",
    ),
    Rename(
        "vllm:time_in_queue_requests",
        "vllm:request_queue_time_seconds",
        "it was there twice",
    ),
    Rename("vllm:num_requests_swapped", "", "the V1 engine does not swap: it preempts"),
    Rename("vllm:cpu_cache_usage_perc", "", "the V1 engine does not swap to the CPU"),
    Rename("vllm:cpu_prefix_cache_hit_rate", "", "the V1 engine does not swap to the CPU"),
    Rename(
        "vllm:gpu_prefix_cache_hit_rate",
        "",
        "divide rates: vllm:prefix_cache_hits_total by vllm:prefix_cache_queries_total",
    ),
    Rename(
        "vllm:avg_prompt_throughput_toks_per_s",
        "",
        "take the rate of vllm:prompt_tokens_total",
    ),
    Rename(
        "vllm:avg_generation_throughput_toks_per_s",
        "",
        "take the rate of vllm:generation_tokens_total",
    ),
    Rename(
        "vllm:model_forward_time_milliseconds",
        "",
        "take vllm:request_inference_time_seconds, or its prefill and decode parts",
    ),
    Rename(
        "vllm:model_execute_time_milliseconds",
        "",
        "take vllm:request_inference_time_seconds, or its prefill and decode parts",
    ),
    Rename("vllm:request_params_best_of", "", "the parameter is no more"),
    Rename("vllm:tokens_total", "", "it was never filled"),
    Rename(
        "vllm:spec_decode_draft_acceptance_rate",
        "",
        "divide rates: vllm:spec_decode_num_accepted_tokens_total by "
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    Rename(
        "vllm:spec_decode_efficiency",
        "",
        "divide rates: vllm:spec_decode_num_accepted_tokens_total by "
        "vllm:spec_decode_num_drafts_total",
    ),
)
SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")

_BY_OLD = {rename.old: rename for rename in RENAMES}


def rename_of(series: str) -> Rename | None:
    """What became of a series, with the suffix that it has."""
    for suffix in ("", *SUFFIXES):
        if suffix and not series.endswith(suffix):
            continue
        found = _BY_OLD.get(series.removesuffix(suffix))
        if found is not None:
            return Rename(series, found.new + suffix if found.new else "", found.how)
    return None
