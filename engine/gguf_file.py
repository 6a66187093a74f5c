"""A Llama in a GGUF file, dequantised tensor by tensor as it is asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from .chat_template import ChatTemplate
from .checkpoint import Checkpoint, ModelNotLoadable
from .llama import LlamaConfig
from .tokenizer import TextTokenizer, byte_level_bpe

_CONTROL = int(gguf.TokenType.CONTROL)
_SINGLE_DIGITS = {"smollm": True, "gpt-2": False, "default": False}  # by pre-tokeniser
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>")

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def open_gguf(path: Path) -> Checkpoint:
    """Raises ModelNotLoadable where the file is another architecture's, KeyError where it lacks
    a field."""
    reader = gguf.GGUFReader(path)

    def field(name: str, default: Any = None) -> Any:
        found = reader.get_field(name)
        if found is not None:
            return found.contents()
        if default is None:
            raise KeyError(name)
        return default

    if (architecture := field("general.architecture")) != "llama":
        raise ModelNotLoadable(f"{path.name} holds a {architecture} model, not a Llama")
    tokens = field("tokenizer.ggml.tokens")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = field("llama.attention.head_count")
    hidden = field("llama.embedding_length")
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("llama.attention.head_count_kv", heads),
        head_dim=field("llama.attention.key_length", hidden // heads),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("llama.context_length"),
        rope_theta=field("llama.rope.freq_base", 10000.0),
        tie_word_embeddings="output.weight" not in tensors,
    )
    if "rope_freqs.weight" in tensors:
        raise ModelNotLoadable(f"{path.name} uses rope scaling, which GGUF files are not read for")

    def weights(name: str) -> Tensor:
        tensor = tensors[_gguf_name(name)]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp stores the two halves of each head interleaved.
            pairs = values.view(-1, config.head_dim // 2, 2, *values.shape[1:])
            values = pairs.transpose(1, 2).reshape(values.shape)
        return values

    ends = {index for index, token in enumerate(tokens) if token in _ENDS}
    return Checkpoint(
        config,
        weights,
        _tokenizer(field, tokens),
        frozenset(ends | {field("tokenizer.ggml.eos_token_id")}),
    )


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    if layer is None:
        return f"{_NAMES[stem]}.{kind}"
    return f"blk.{layer[1]}.{_NAMES[layer[2]]}.{kind}"


def _tokenizer(field: Any, tokens: list[str]) -> TextTokenizer:
    if (model := field("tokenizer.ggml.model")) != "gpt2":
        raise ModelNotLoadable(f"tokenizer {model!r} is not byte-level BPE")
    if (pre := field("tokenizer.ggml.pre", "default")) not in _SINGLE_DIGITS:
        raise ModelNotLoadable(f"unknown pre-tokeniser {pre!r}")
    kinds = field("tokenizer.ggml.token_type")
    bos_id = field("tokenizer.ggml.bos_token_id", -1)
    bos = tokens[bos_id] if bos_id >= 0 else ""
    merges = [merge.split(" ", 1) for merge in field("tokenizer.ggml.merges")]
    tokenizer = byte_level_bpe(
        {token: index for index, token in enumerate(tokens)},
        [(left, right) for left, right in merges],
        special=[token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL],
        bos=bos if field("tokenizer.ggml.add_bos_token", False) else "",
        single_digits=_SINGLE_DIGITS[pre],
    )
    text = field("tokenizer.chat_template", "")
    eos = tokens[field("tokenizer.ggml.eos_token_id")]
    template = ChatTemplate(text, bos_token=bos, eos_token=eos) if text else None
    return TextTokenizer(tokenizer, template)
