"""The plug-in with DeepSeek-V2's architecture: latent attention and a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_lab import Server, one_server_at_a_time
from watched import Watched, at_once

from dsagent.instrumentation.records import Phase

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def deepseek(plugged: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    flags = ("--dtype", "bfloat16", "--load-format", "dummy", "--max-num-batched-tokens", "256")
    with one_server_at_a_time():
        server = Server(
            plugged.overlay.path, "tiny-deepseek-v2", tmp_path_factory.mktemp("deepseek"), *flags
        )
        try:
            server.wait_until_up()
            watched = Watched(server)
            yield watched
            watched.close()
        finally:
            server.stop()


def test_exact_records(deepseek: Watched) -> None:
    bodies = [
        {"prompt": "word " * count, "max_tokens": 12, "ignore_eos": True} for count in (4, 40, 600)
    ]
    replies = at_once(
        [lambda body=body: deepseek.server.post("/v1/completions", body) for body in bodies]
    )
    for reply in replies:
        record = deepseek.record(reply["id"])
        shares = [share for _, share in deepseek.shares(record)]
        assert sum(share.output_tokens for share in shares) == 12 == record.output_tokens
        prefilled = sum(s.scheduled_tokens for s in shares if s.phase is Phase.PREFILL)
        assert prefilled == record.prompt_tokens == reply["usage"]["prompt_tokens"]
    assert any(len(step.shares) == 3 for step in deepseek.steps)


def test_the_counts_are_vllms_own(deepseek: Watched) -> None:
    def equal() -> bool:
        deepseek.read()
        theirs = deepseek.server.metrics()
        steps = sum(any(s.output_tokens for s in step.shares) for step in deepseek.steps)
        tokens = sum(s.output_tokens for step in deepseek.steps for s in step.shares)
        return (steps, tokens) == (
            theirs["vllm:iteration_tokens_total_count"],
            theirs["vllm:generation_tokens_total"],
        )

    deepseek.until(equal, "equal counts")
    deepseek.until(lambda: len(deepseek.ranks) == len(deepseek.steps), "the worker's steps")
    for reader in deepseek.readers:
        assert reader.health().failures == 0
        assert reader.counters.uncounted_loss == 0
