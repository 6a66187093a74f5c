"""Llama: grouped-query attention, rotary positions, a gated MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as fn

from .linear import Linear, linear
from .model import Batch, Chunk, Model, Weights

# oneDNN multiplies four rows in less time than one or two.
_FEWEST_ROWS = 4


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama; field names follow Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> all query heads, key heads, value heads
    attention_out: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> gate, up
    down: Linear


class Llama(Model):
    """Keys and values of a token lie side by side: one row is written and one is read."""

    def __init__(self, config: LlamaConfig, weights: Weights) -> None:
        if config.hidden_act != "silu":
            raise ValueError(f"activation {config.hidden_act!r} is not supported, only silu")
        self.config = config
        self.vocab_size = config.vocab_size
        self.context_length = config.max_position_embeddings
        embedding = weights("model.embed_tokens.weight")
        self.device, self.dtype = embedding.device, embedding.dtype
        self._embedding = embedding
        self._layers = [
            _read_layer(config, weights, f"model.layers.{index}.")
            for index in range(config.num_hidden_layers)
        ]
        self._norm = weights("model.norm.weight")
        self._head = linear(embedding if config.tie_word_embeddings else weights("lm_head.weight"))
        self._frequencies = _rope_frequencies(config).to(self.device)
        self._kv: list[Tensor] = []

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.config
        row = 2 * config.num_key_value_heads * config.head_dim
        return config.num_hidden_layers * row * self.dtype.itemsize

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        config = self.config
        shape = (num_blocks, block_size, 2, config.num_key_value_heads, config.head_dim)
        self._kv = [_zeros(shape, self.dtype, self.device) for _ in range(config.num_hidden_layers)]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        eps, width = self.config.rms_norm_eps, (self.config.hidden_size,)
        rows = len(batch.token_ids)
        hidden = fn.embedding(batch.token_ids, self._embedding)
        if rows < _FEWEST_ROWS:
            hidden = fn.pad(hidden, (0, 0, 0, _FEWEST_ROWS - rows))
        attention = _Attention(self.config, batch, self._frequencies, self._kv[0])
        for layer, kv in zip(self._layers, self._kv, strict=True):
            normed = fn.rms_norm(hidden, width, layer.attention_norm, eps)
            hidden += layer.attention_out(attention(layer.qkv(normed), kv))
            normed = fn.rms_norm(hidden, width, layer.mlp_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden += layer.down(fn.silu(gate).mul_(up))
        normed = fn.rms_norm(hidden[batch.logit_rows], width, self._norm, eps)
        return self._head(normed).float()


class _Attention:
    """Attention of one batch; what is alike in all layers is worked out once."""

    def __init__(self, config: LlamaConfig, batch: Batch, frequencies: Tensor, kv: Tensor) -> None:
        self.batch = batch
        self.rows = len(batch.token_ids)
        self.query_heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        angles = torch.outer(batch.positions.float(), frequencies).unsqueeze(1)
        self.rotation = torch.polar(torch.ones_like(angles), angles)
        self.decode_blocks = batch.decode_blocks.flatten()
        reach = torch.arange(batch.decode_blocks.shape[1] * kv.shape[1], device=kv.device)
        unwritten = reach >= batch.decode_lengths.view(-1, 1, 1, 1)
        self.decode_mask = _minus_infinity(unwritten, kv.dtype)
        self.chunk_masks = [_chunk_mask(chunk, kv) for chunk in batch.chunks]

    def __call__(self, qkv: Tensor, kv: Tensor) -> Tensor:
        """[rows or more, all heads] and one layer's cache to [rows or more, query heads].

        Rows beyond the batch's own are padding, and come out as zeros.
        """
        batch, rows, queries = self.batch, self.rows, self.query_heads * self.head_dim
        heads = qkv[:rows].view(rows, -1, self.head_dim)
        _rotate(heads[:, : self.query_heads + self.kv_heads], self.rotation)
        new_kv = qkv[:rows, queries:].view(rows, 2, self.kv_heads, self.head_dim)
        kv.flatten(0, 1).index_copy_(0, batch.slots, new_kv)
        out = qkv.new_zeros(len(qkv), queries)
        if batch.decodes:
            # The query heads that share a key head stand where a prefill's tokens would.
            query = qkv[: batch.decodes, :queries].view(
                batch.decodes, self.kv_heads, -1, self.head_dim
            )
            cached = kv.index_select(0, self.decode_blocks)
            keys, values = cached.view(batch.decodes, -1, *kv.shape[2:]).transpose(1, 3).unbind(2)
            mixed = fn.scaled_dot_product_attention(query, keys, values, self.decode_mask)
            out[: batch.decodes] = mixed.flatten(1)
        for chunk, mask in zip(batch.chunks, self.chunk_masks, strict=True):
            query = heads[chunk.start : chunk.end, : self.query_heads].transpose(0, 1)
            cached = kv.index_select(0, chunk.blocks).flatten(0, 1)[: mask.shape[1]]
            keys, values = cached.transpose(0, 2).unbind(1)
            mixed = fn.scaled_dot_product_attention(
                query[None], keys[None], values[None], mask, enable_gqa=True
            )
            out[chunk.start : chunk.end] = mixed[0].transpose(0, 1).flatten(1)
        return out


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy leaves the zeroing to the kernel: memory is taken page by page, when it is used.
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def _rotate(heads: Tensor, rotation: Tensor) -> None:
    """Rotary positions, in place: pairs of neighbours as complex numbers, turned in one product."""
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], -1, 2)).mul_(rotation)
    if heads.dtype != torch.float32:
        heads.copy_(torch.view_as_real(pairs).flatten(-2))


def _minus_infinity(where: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(where.shape, dtype=dtype, device=where.device).masked_fill_(
        where, float("-inf")
    )


def _chunk_mask(chunk: Chunk, kv: Tensor) -> Tensor:
    """[new tokens, context + new tokens]: a token sees what came before it, and itself."""
    position = torch.arange(chunk.context + chunk.end - chunk.start, device=kv.device)
    return _minus_infinity(position > position[chunk.context :, None], kv.dtype)


def _read_layer(config: LlamaConfig, weights: Weights, prefix: str) -> _Layer:
    def joined(part: str, *names: str) -> Linear:
        biased = config.attention_bias and part == "self_attn"
        weight = [
            _for_pairs(config, name, weights(f"{prefix}{part}.{name}.weight")) for name in names
        ]
        bias = [
            _for_pairs(config, name, weights(f"{prefix}{part}.{name}.bias"))
            for name in names
            if biased
        ]
        return linear(torch.cat(weight), torch.cat(bias) if bias else None)

    return _Layer(
        attention_norm=weights(f"{prefix}input_layernorm.weight"),
        qkv=joined("self_attn", "q_proj", "k_proj", "v_proj"),
        attention_out=joined("self_attn", "o_proj"),
        mlp_norm=weights(f"{prefix}post_attention_layernorm.weight"),
        gate_up=joined("mlp", "gate_proj", "up_proj"),
        down=joined("mlp", "down_proj"),
    )


def _for_pairs(config: LlamaConfig, name: str, rows: Tensor) -> Tensor:
    """Hugging Face turns element i with element i + head_dim / 2, this engine with its neighbour:
    reorders the rows of a query or key projection, weight or bias, accordingly."""
    if name not in {"q_proj", "k_proj"}:
        return rows
    halves = rows.view(-1, 2, config.head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _rope_frequencies(config: LlamaConfig) -> Tensor:
    """Radians per position for each pair: float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    frequencies = torch.pow(config.rope_theta, exponents).reciprocal()
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r} is not supported")
    # Llama 3.1: slow turns are stretched by `factor`, fast ones kept, those between blended.
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    blended: Tensor = frequencies * (kept + (1 - kept) / scaling["factor"])
    return blended
