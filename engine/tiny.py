"""tiny-llama: random weights from a seed, for tests that need an engine and no sense."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from .chat_template import ChatTemplate
from .checkpoint import Checkpoint
from .llama import LlamaConfig
from .tokenizer import BYTE_LEVEL, TextTokenizer, byte_level_bpe

_CONFIG = LlamaConfig(
    vocab_size=258,  # the bytes, begin, end
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=2048,
    rope_theta=10000.0,
)
_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def open_tiny() -> Checkpoint:
    """The same weights on every machine. Token i is byte i; then come the two special ones."""
    begin, end = "<s>", "</s>"
    vocabulary = {**BYTE_LEVEL, begin: 256, end: 257}
    tokenizer = byte_level_bpe(vocabulary, [], special=[begin, end], bos=begin)
    template = ChatTemplate(_CHAT, bos_token=begin, eos_token=end)
    return Checkpoint(
        _CONFIG, _weights, TextTokenizer(tokenizer, template), frozenset({vocabulary[end]})
    )


def _weights(name: str) -> Tensor:
    config = _CONFIG
    kv_width = config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in {"input_layernorm", "post_attention_layernorm", "norm"}:
        return torch.ones(hidden)
    shape = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (hidden, hidden),
        "k_proj": (kv_width, hidden),
        "v_proj": (kv_width, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }[part]
    # Each weight has a generator of its own, so that the order of asking does not matter.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    scale = 1.0 if part == "embed_tokens" else shape[1] ** -0.5
    return torch.randn(shape, generator=generator) * scale
