"""One contender of bench_engine.py, in a process of its own.

engine_contender.py NAME FOLDER: says "ready" when the model is loaded, then, for each line
"STREAMS PROMPT_TOKENS NEW_TOKENS SEED" on its input, "took" and the seconds.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

VOCABULARY = 49_000

Generate = Callable[[list[list[int]], int], None]


def engine(folder: str) -> Generate:
    """Engine.step, without the HTTP server."""
    from dsagent.engine.config import EngineConfig
    from dsagent.engine.loader import load_model
    from dsagent.engine.loop import Engine
    from dsagent.engine.observe import StepObserver
    from dsagent.engine.request import SamplingParams

    running = Engine(
        load_model("smollm2", device="cpu"),
        EngineConfig(),
        observer=StepObserver(),
        on_outputs=lambda outputs: None,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            running.submit(str(number), prompt, sampling)
        while running.step():
            pass

    return generate


def transformers(folder: str) -> Generate:
    """generate() on one batch, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )

    return generate


def vllm(folder: str) -> Generate:
    """vLLM's own offline interface, with the options that are fastest on a CPU."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, attr-defined, unused-ignore]

    model = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        sampling = SamplingParams(
            max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        model.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    return generate


def ceiling(folder: str) -> Generate:
    """Nothing but the matrix products of these shapes, as torch does them on plain weights."""
    import torch
    from torch.nn.functional import linear

    def weights(rows: int, columns: int) -> list[torch.Tensor]:
        return [torch.randn(rows, columns) for _ in range(30)]

    qkv, out, gate_up, down = (
        weights(960, 576),
        weights(576, 576),
        weights(3072, 576),
        weights(576, 1536),
    )
    head = torch.randn(49_152, 576)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        narrow, wide = torch.randn(len(prompts), 576), torch.randn(len(prompts), 1536)
        with torch.inference_mode():
            for _ in range(new_tokens):
                for a, b, c, d in zip(qkv, out, gate_up, down, strict=True):
                    linear(narrow, a)
                    linear(narrow, b)
                    linear(narrow, c)
                    linear(wide, d)
                linear(narrow, head)

    return generate


CONTENDERS: dict[str, Callable[[str], Generate]] = {
    "engine": engine,
    "transformers": transformers,
    "vllm": vllm,
    "ceiling": ceiling,
}


def main() -> None:
    name, folder = sys.argv[1:]
    begun = time.monotonic()
    generate = CONTENDERS[name](folder)
    generate([[1, 2, 3]], 2)
    print(f"ready {time.monotonic() - begun}", flush=True)
    for line in sys.stdin:
        streams, prompt_tokens, new_tokens, seed = map(int, line.split())
        dice = random.Random(seed)
        prompts = [
            [dice.randrange(VOCABULARY) for _ in range(prompt_tokens)] for _ in range(streams)
        ]
        begun = time.monotonic()
        generate(prompts, new_tokens)
        print(f"took {time.monotonic() - begun}", flush=True)


if __name__ == "__main__":
    main()
