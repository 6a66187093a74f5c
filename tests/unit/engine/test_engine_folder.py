"""Hugging Face folders: what transformers saved is what the engine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dsagent.engine.config import EngineConfig
from dsagent.engine.loader import LoadedModel, ModelNotLoadable, load_model
from dsagent.engine.loop import Engine
from dsagent.engine.request import SamplingParams
from dsagent.engine.tokenizer import BYTE_LEVEL, byte_level_bpe

from .conftest import Watcher

NEW_TOKENS = 40
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def save(folder: Path, **settings: Any) -> LlamaForCausalLM:
    """A Llama whose random weights are large enough for clear decisions."""
    config = LlamaConfig(
        **{
            "vocab_size": 300,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "eos_token_id": [299, 298],
            **settings,
        }
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(
        folder, max_shard_size="60KB" if settings.get("attention_bias") else "1GB"
    )
    byte_level_bpe(BYTE_LEVEL, [], special=[]).save(str(folder / "tokenizer.json"))
    return model


def prompts() -> list[list[int]]:
    dice = torch.Generator().manual_seed(1)
    lengths = (1, 3, 15, 16, 17, 31, 33, 64, 90, 150)
    made = [torch.randint(0, 300, (n,), generator=dice).tolist() for n in lengths]
    return [*made, made[-1][:100] + made[0], made[-1][:100] + made[1]]


def greedy(model: LlamaForCausalLM, prompt: list[int]) -> tuple[list[int], int]:
    """transformers' tokens, and how many of them come before the first close call."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(out.logits).topk(2).values
    close = (best[:, 0] - best[:, 1] < 1e-3).nonzero().flatten().tolist()
    tokens = out.sequences[0, len(prompt) :].tolist()
    return tokens, close[0] if close else len(tokens)


def run(loaded: LoadedModel, **settings: Any) -> tuple[list[list[int]], Watcher]:
    watcher = Watcher()
    engine = Engine(loaded, EngineConfig(**settings), observer=watcher, on_outputs=watcher.take)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    for number, prompt in enumerate(prompts()):
        engine.submit(str(number), prompt, sampling)
    while engine.step():
        pass
    return [watcher.tokens(str(number)) for number in range(len(prompts()))], watcher


def assert_same(model: LlamaForCausalLM, tokens: list[list[int]]) -> None:
    for prompt, said in zip(prompts(), tokens, strict=True):
        expected, certain = greedy(model, prompt)
        assert said[:certain] == expected[:certain]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 6, "head_dim": 10},
        {"attention_bias": True},
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ],
    ids=["grouped", "tied", "bias-sharded", "llama3-rope", "linear-rope"],
)
def test_a_folder_runs_as_in_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = save(tmp_path / "mine", **settings)
    loaded = load_model(str(tmp_path / "mine"), device="cpu")
    assert loaded.name == "mine"
    assert loaded.tokenizer.encode("A") == [0x41]
    assert loaded.eos_token_ids == {298, 299}
    assert_same(model, run(loaded)[0])


def test_nothing_depends_on_how_the_work_is_cut(tmp_path: Path) -> None:
    model = save(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert_same(model, run(loaded, max_num_seqs=1, enable_prefix_cache=False)[0])
    assert_same(model, run(loaded, max_num_seqs=3, max_num_batched_tokens=7)[0])
    tokens, watcher = run(loaded, max_num_seqs=2)
    assert sum(share.cached_tokens for step in watcher.steps for share in step.shares) >= 96
    assert_same(model, tokens)
    tokens, watcher = run(loaded, num_kv_blocks=12)
    assert sum(step.preempted for step in watcher.steps) > 0
    assert any(share.is_recompute for step in watcher.steps for share in step.shares)
    assert_same(model, tokens)


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "MLP"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3"),
        ({"num_attention_heads": "many"}, "many"),
    ],
)
def test_what_cannot_run_is_said(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    save(tmp_path)
    change(tmp_path, **settings)
    with pytest.raises(ModelNotLoadable, match=text):
        load_model(str(tmp_path), device="cpu")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoadable, match="no model 'nosuch'"):
        load_model("nosuch")
    with pytest.raises(ModelNotLoadable, match=r"config\.json"):
        load_model(str(tmp_path))
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotLoadable):
        load_model(str(tmp_path))
