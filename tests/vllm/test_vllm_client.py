"""`vllm bench serve`, an independent client: its figures of each request are ours."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm_lab import ENVIRONMENT, MODELS, SERVED_AS
from watched import Watched

from dsagent.instrumentation.records import RequestRecord

REQUESTS = 12
PROMPT, TOKENS = 112, 12
LEAST_NS, LEAST_RATIO = 5e6, 0.02  # 5 ms or 2 %, whichever is more

Pair = tuple[RequestRecord, dict[str, Any]]


@pytest.fixture(scope="module")
def pairs(plugged: Any, served: Watched, tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """Each of the client's requests beside our record of it."""
    folder: Path = tmp_path_factory.mktemp("client")
    ran = subprocess.run(
        [
            *(str(plugged.overlay.path / "bin" / "vllm"), "bench", "serve"),
            *("--backend", "openai", "--base-url", f"http://127.0.0.1:{served.server.port}"),
            *("--model", SERVED_AS, "--tokenizer", str(MODELS / "smollm2")),
            *("--dataset-name", "random", "--random-input-len", str(PROMPT)),
            *("--random-output-len", str(TOKENS), "--num-prompts", str(REQUESTS), "--ignore-eos"),
            *("--request-rate", "3", "--max-concurrency", "4", "--save-result"),
            *("--save-detailed", "--result-dir", str(folder), "--result-filename", "bench.json"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    document = json.loads((folder / "bench.json").read_text())
    assert document["completed"] == REQUESTS
    found = []
    # The client's clock is ours, CLOCK_MONOTONIC: the order of the starts is that of the records.
    starts = sorted(range(REQUESTS), key=document["start_times"].__getitem__)
    served.until(
        lambda: len(_since(served, document["start_times"][starts[0]])) >= REQUESTS, "the records"
    )
    records = _since(served, document["start_times"][starts[0]])
    for place, record in zip(starts, records, strict=True):
        theirs = {
            "ttft": document["ttfts"][place] * 1e9,
            "itls": [seconds * 1e9 for seconds in document["itls"][place]],
            "e2e": document["latencies"][place] * 1e9,
            "tokens": (document["input_lens"][place], document["output_lens"][place]),
        }
        found.append((record, theirs))
    return found


def _since(served: Watched, seconds: float) -> list[RequestRecord]:
    """The requests received since then, in order."""
    found = [record for record in served.closed if record.received_ns >= seconds * 1e9]
    return sorted(found, key=lambda record: record.received_ns)


def agree(both: list[tuple[float, float]]) -> None:
    """Ours and theirs differ, at the median, by less than 5 ms or 2 %."""
    off_ns = statistics.median(abs(ours - theirs) for ours, theirs in both)
    assert off_ns <= max(LEAST_NS, LEAST_RATIO * statistics.median(t for _, t in both)), both


def test_tokens(pairs: list[Pair]) -> None:
    assert [(r.prompt_tokens, r.output_tokens) for r, _ in pairs] == [
        theirs["tokens"] for _, theirs in pairs
    ]


def test_time_to_the_first_token(pairs: list[Pair]) -> None:
    agree([(record.ttft_ns or 0, theirs["ttft"]) for record, theirs in pairs])


def test_time_per_token(pairs: list[Pair]) -> None:
    client = [(t["e2e"] - t["ttft"]) / (r.output_tokens - 1) for r, t in pairs]
    agree([(r.tpot_ns or 0, theirs) for (r, _), theirs in zip(pairs, client, strict=True)])


def test_time_between_tokens(served: Watched, pairs: list[Pair]) -> None:
    both = []
    for record, theirs in pairs:
        outputs = [step.end_ns for step, share in served.shares(record) if share.output_tokens]
        ours = [after - before for before, after in pairwise(outputs)]
        if len(ours) == len(theirs["itls"]):  # else the client has read two tokens at once
            both += list(zip(ours, theirs["itls"], strict=True))
    assert len(both) >= REQUESTS * TOKENS / 2
    agree(both)
