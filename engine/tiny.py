"""tiny-llama: random weights from a seed, for tests that need an engine and no sense."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from .checkpoint import ByteTokenizer, Checkpoint
from .llama import LlamaConfig

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


def open_tiny() -> Checkpoint:
    """The same weights on every machine."""
    return Checkpoint(_CONFIG, _weights, ByteTokenizer(), frozenset({ByteTokenizer().eos_token_id}))


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
