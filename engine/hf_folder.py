"""A Llama in a local Hugging Face folder: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from .chat_template import ChatTemplate
from .checkpoint import Checkpoint, ModelNotLoadable
from .llama import LlamaConfig
from .tokenizer import TextTokenizer


def open_folder(folder: Path) -> Checkpoint:
    """Raises ModelNotLoadable for an architecture that is not supported; KeyError, OSError,
    ValueError where the folder is not as it should be."""
    spec = _read_json(folder / "config.json")
    architectures = spec.get("architectures") or ["none named"]
    if architectures != ["LlamaForCausalLM"]:
        raise ModelNotLoadable(f"architecture {architectures[0]} is not supported")
    files = _weight_files(folder)

    def weights(name: str) -> Tensor:
        with safe_open(files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    generation = folder / "generation_config.json"
    ends = (_read_json(generation) if generation.exists() else {}).get("eos_token_id")
    ends = spec.get("eos_token_id") if ends is None else ends
    ends = [] if ends is None else ends
    return Checkpoint(
        _config(spec, tied="lm_head.weight" not in files),
        weights,
        read_tokenizer(folder),
        frozenset(ends if isinstance(ends, list) else [ends]),
    )


def _config(spec: dict[str, Any], *, tied: bool) -> LlamaConfig:
    if spec.get("mlp_bias"):
        raise ModelNotLoadable("biases in the MLP are not supported")
    heads = int(spec["num_attention_heads"])
    # transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling.
    rope = spec.get("rope_parameters") or spec.get("rope_scaling") or {}
    return LlamaConfig(
        vocab_size=int(spec["vocab_size"]),
        hidden_size=int(spec["hidden_size"]),
        intermediate_size=int(spec["intermediate_size"]),
        num_hidden_layers=int(spec["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=int(spec.get("num_key_value_heads") or heads),
        head_dim=int(spec.get("head_dim") or spec["hidden_size"] // heads),
        rms_norm_eps=float(spec.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(spec["max_position_embeddings"]),
        rope_theta=float(rope.get("rope_theta") or spec.get("rope_theta") or 10000.0),
        rope_scaling=rope,
        tie_word_embeddings=bool(spec.get("tie_word_embeddings", False)) or tied,
        attention_bias=bool(spec.get("attention_bias", False)),
        hidden_act=str(spec.get("hidden_act", "silu")),
    )


def _weight_files(folder: Path) -> dict[str, Path]:
    """Which file holds each weight."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = _read_json(index)["weight_map"]
        # A name with a path in it could lead out of the folder.
        return {name: folder / Path(file).name for name, file in named.items()}
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def read_tokenizer(folder: Path) -> TextTokenizer:
    """tokenizer.json with the chat template beside it. Raises ModelNotLoadable, OSError,
    ValueError."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The library raises bare Exception for whatever it cannot read.
    except Exception as error:
        raise ModelNotLoadable(f"cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(tokenizer, _chat_template(folder))


def _chat_template(folder: Path) -> ChatTemplate | None:
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = _read_json(config_path) if config_path.exists() else {}
    text = config.get("chat_template")
    if template_path.exists():
        text = template_path.read_text("utf-8")
    if isinstance(text, list):  # several by name
        text = {item["name"]: item["template"] for item in text}.get("default")
    if text is None:
        return None

    def special(name: str) -> str:
        """A special token is there as a string or as an object."""
        token = config.get(name)
        return str(token["content"] if isinstance(token, dict) else token or "")

    return ChatTemplate(text, bos_token=special("bos_token"), eos_token=special("eos_token"))


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text("utf-8"))
    if not isinstance(content, dict):
        raise TypeError(f"{path.name} does not hold an object")
    return content
