"""What a model looks like on disk, whatever the format."""

from __future__ import annotations

from dataclasses import dataclass

from .llama import LlamaConfig
from .model import Weights
from .tokenizer import TextTokenizer


class ModelNotLoadable(Exception):  # noqa: N818 - what the caller cannot load, not what broke
    """No such model, or one that this engine cannot run; the text says which."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that can be built. Weights have Hugging Face's names, shapes and row order."""

    config: LlamaConfig
    weights: Weights
    tokenizer: TextTokenizer
    eos_token_ids: frozenset[int]
