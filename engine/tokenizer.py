"""Text to token ids and back: byte-level BPE, a Hugging Face folder, or plain bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .chat_template import ChatTemplate, ChatTemplateError
from .checkpoint import (
    BpeTokenizer,
    ByteTokenizer,
    FolderTokenizer,
    ModelNotLoadable,
    TokenizerSource,
)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

# For models without weights worth talking to, so that chat can be tried on them.
_PLAIN_CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class TextTokenizer(Protocol):
    """What the front end needs of a tokenizer.

    `token_bytes[i]` are the bytes that id i stands for; nothing for special tokens.
    """

    token_bytes: Sequence[bytes]

    def encode(self, text: str) -> list[int]:
        """A prompt's ids, with what the model wants in front of it."""

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The ids of a conversation. Raises ChatTemplateError."""


def load_tokenizer(source: TokenizerSource) -> TextTokenizer:
    """Raises ModelNotLoadable where a folder's tokenizer is missing or of an unknown kind."""
    if isinstance(source, ByteTokenizer):
        return PlainBytes(source)
    if isinstance(source, BpeTokenizer):
        return _from_bpe(source)
    return _from_folder(source)


class PlainBytes:
    """Token i is byte i."""

    def __init__(self, source: ByteTokenizer) -> None:
        self.token_bytes: Sequence[bytes] = [bytes([value]) for value in range(256)]
        self._bos = [source.bos_token_id]
        self._template = ChatTemplate(_PLAIN_CHAT)

    def encode(self, text: str) -> list[int]:
        return self._bos + list(text.encode("utf-8"))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode(self._template.render(messages))


class Vocabulary:
    """A tokenizer of the `tokenizers` library with a chat template, if the model has one."""

    def __init__(
        self, tokenizer: Tokenizer, token_bytes: Sequence[bytes], template: ChatTemplate | None
    ) -> None:
        self.token_bytes = token_bytes
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        text = self._template.render(messages)
        # The template has written the special tokens itself.
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _from_bpe(source: BpeTokenizer) -> Vocabulary:
    vocabulary = {token: index for index, token in enumerate(source.tokens)}
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in source.merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if source.pre == "smollm":
        # Trained with every digit a word of its own.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    elif source.pre in ("gpt-2", "default"):
        tokenizer.pre_tokenizer = byte_level
    else:
        raise ModelNotLoadable(f"unknown pre-tokeniser {source.pre!r}")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(source.tokens[index], special=True) for index in sorted(source.control_ids)]
    )
    bos = "" if source.bos_token_id is None else source.tokens[source.bos_token_id]
    if source.add_bos and source.bos_token_id is not None:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, source.bos_token_id)]
        )
    template = source.chat_template and ChatTemplate(
        source.chat_template, bos_token=bos, eos_token=source.tokens[source.eos_token_id]
    )
    table = _byte_level_table(list(source.tokens), source.control_ids)
    return Vocabulary(tokenizer, table, template or None)


def _from_folder(source: FolderTokenizer) -> Vocabulary:
    path = source.folder / "tokenizer.json"
    try:
        spec = json.loads(path.read_text("utf-8"))
        tokenizer = Tokenizer.from_file(str(path))
    # The library raises bare Exception for whatever it cannot read.
    except Exception as error:
        raise ModelNotLoadable(f"cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    by_id = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id.get(index, "") for index in range(max(by_id) + 1)]
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(index for index, token in added.items() if token.special)
    kind = json.dumps(spec.get("decoder"))
    if '"ByteLevel"' in kind:
        table = _byte_level_table(tokens, special)
    elif '"ByteFallback"' in kind or '"Metaspace"' in kind:
        table = _sentencepiece_table(tokens, special)
    else:
        raise ModelNotLoadable(f"{path}: unknown kind of decoder {kind[:80]}")
    for index, token in added.items():
        if not token.special:
            table[index] = token.content.encode("utf-8")
    return Vocabulary(tokenizer, table, _folder_template(source.folder))


def _folder_template(folder: Path) -> ChatTemplate | None:
    config: dict[str, Any] = {}
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        if config_path.exists():
            config = json.loads(config_path.read_text("utf-8"))
        text = template_path.read_text("utf-8") if template_path.exists() else None
    except (OSError, ValueError) as error:
        raise ModelNotLoadable(f"cannot read the chat template in {folder}: {error}") from error
    if text is None:
        text = config.get("chat_template")
    if isinstance(text, list):  # several by name
        text = next((item["template"] for item in text if item.get("name") == "default"), None)
    if not isinstance(text, str):
        return None
    return ChatTemplate(
        text,
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
    )


def _token_text(token: object) -> str:
    """tokenizer_config.json has a special token as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _byte_level_table(tokens: Sequence[str], special: frozenset[int]) -> list[bytes]:
    byte_of = {char: value for value, char in enumerate(_byte_level_alphabet())}
    return [
        b"" if index in special else bytes(byte_of[char] for char in token if char in byte_of)
        for index, token in enumerate(tokens)
    ]


def _sentencepiece_table(tokens: Sequence[str], special: frozenset[int]) -> list[bytes]:
    def meaning(index: int, token: str) -> bytes:
        if index in special:
            return b""
        if match := _BYTE_TOKEN.match(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode("utf-8")

    return [meaning(index, token) for index, token in enumerate(tokens)]


def _byte_level_alphabet() -> list[str]:
    """The character that stands for each byte: itself where it can be seen, else from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, invisible = [], 0
    for value in range(256):
        if value in visible:
            alphabet.append(chr(value))
        else:
            alphabet.append(chr(0x100 + invisible))
            invisible += 1
    return alphabet
