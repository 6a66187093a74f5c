"""`dsagent serve`: becomes the reference engine."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated, Literal

from dsagent.agent.errors import FINDINGS, DsagentError
from dsagent.agent.settings import option


def serve(
    model: Annotated[
        str, option(metavar="NAME|DIR", help="smollm2, tiny-llama, or a model's folder.")
    ],
    host: Annotated[str, option(metavar="HOST", help="The address to listen on.")] = ("127.0.0.1"),
    port: Annotated[int, option(metavar="PORT", min=0, max=65535, help="0: a free one.")] = 8000,
    spans: Annotated[
        Literal["none", "sdk"],
        option(metavar="none|sdk", help="sdk: emit spans in the engine's own process too."),
    ] = "none",
    pyroscope: Annotated[
        str | None,
        option(metavar="URL", help="Profile the engine by phase, pushed to Pyroscope there."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, option(metavar="N", min=1, help="Requests in one batch at most.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, option(metavar="N", min=1, help="Tokens in one step at most.")
    ] = None,
    num_kv_blocks: Annotated[
        int | None, option(metavar="N", min=1, help="KV cache blocks of 16 tokens.")
    ] = None,
    max_model_len: Annotated[
        int | None, option(metavar="N", min=1, help="Longest prompt and reply together.")
    ] = None,
    no_prefix_cache: Annotated[
        bool, option("--no-prefix-cache", help="Compute every prompt from its beginning.")
    ] = False,
    threads: Annotated[
        int | None, option(metavar="N", min=1, help="CPU threads of the engine.")
    ] = None,
) -> None:
    """Serve a model with the bundled engine.

    Ready to be attached to: the process becomes the engine, its pid is the one for `attach`.

    \b
    Example:
      dsagent serve --model smollm2 --port 8000
    """
    arguments = ["--model", model, "--host", host, "--port", str(port), "--spans", spans]
    for flag, value in (
        ("--pyroscope", pyroscope),
        ("--max-num-seqs", max_num_seqs),
        ("--max-num-batched-tokens", max_num_batched_tokens),
        ("--num-kv-blocks", num_kv_blocks),
        ("--max-model-len", max_model_len),
        ("--threads", threads),
    ):
        if value is not None:
            arguments += [flag, str(value)]
    if no_prefix_cache:
        arguments.append("--no-prefix-cache")
    if importlib.util.find_spec("torch") is None:
        raise DsagentError(
            "the engine needs PyTorch: pip install 'dsagent[engine]'", exit_code=FINDINGS
        )
    os.execv(
        sys.executable, [sys.executable, "-m", "dsagent.instrumentation.reference", *arguments]
    )
