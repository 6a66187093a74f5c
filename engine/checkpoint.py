"""What a model looks like on disk, whatever the format: shape, weights, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .llama import LlamaConfig
from .model import Weights


class ModelNotLoadable(Exception):  # noqa: N818 - what the caller cannot load, not what broke
    """No such model, or one that this engine cannot run; the text says which."""


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja in a Hugging Face folder."""

    folder: Path


@dataclass(frozen=True, slots=True)
class BpeTokenizer:
    """A GPT-2 style byte-level BPE vocabulary, as a GGUF file carries it."""

    tokens: tuple[str, ...]  # by id, in the byte-to-unicode alphabet
    control_ids: frozenset[int]  # special tokens, matched as whole strings
    merges: tuple[str, ...]  # "left right", best first
    pre: str  # name of the pre-tokeniser, e.g. "smollm"
    chat_template: str | None  # Jinja
    bos_token_id: int | None
    eos_token_id: int
    add_bos: bool


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Token i is byte i; `bos_token_id` and `eos_token_id` come after the 256 bytes."""

    bos_token_id: int = 256
    eos_token_id: int = 257


TokenizerSource = FolderTokenizer | BpeTokenizer | ByteTokenizer


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that can be built. Weights have Hugging Face's names, shapes and row order."""

    config: LlamaConfig
    weights: Weights
    tokenizer: TokenizerSource
    eos_token_ids: frozenset[int]
