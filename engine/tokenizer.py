"""Text to token ids, and the bytes that each id stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from .chat_template import ChatTemplate, ChatTemplateError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TextTokenizer:
    """A tokenizer of the `tokenizers` library and a chat template, if the model has one.

    `token_bytes[i]` are the bytes that id i stands for; nothing for special tokens.
    Raises ValueError for a kind of tokenizer whose bytes are not known.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.token_bytes = _token_bytes(tokenizer)
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, text: str) -> list[int]:
        """A prompt's ids, with what the model wants in front of it."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The ids of a conversation. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        text = self._template.render(messages)
        # The template has written the special tokens itself.
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def byte_level_bpe(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    special: Sequence[str],
    bos: str = "",
    single_digits: bool = False,
) -> Tokenizer:
    """GPT-2's kind of tokenizer. `special` tokens are matched as whole strings; `bos`, where
    given, goes in front of every prompt; `single_digits`: every digit is a word of its own."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=list(merges)))
    words = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, *words])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    if bos:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE writes a byte as the character of that number where it can be seen;
    the characters from U+0100 on are the remaining bytes in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    visible = {char: ord(char) for char in alphabet if ord(char) < 0x100}
    remaining = sorted(set(range(0x100)) - set(visible.values()))
    return visible | dict(zip(alphabet[len(visible) :], remaining, strict=True))


BYTE_LEVEL = _bytes_of_characters()


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    decoder = repr(tokenizer.decoder)
    byte_level = "ByteLevel" in decoder
    if not byte_level and "ByteFallback" not in decoder and "Metaspace" not in decoder:
        raise ValueError(f"unknown kind of tokenizer: its decoder is {decoder[:80]}")
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        if index in added:
            table[index] = b"" if added[index].special else token.encode()
        elif byte_level:
            table[index] = bytes(BYTE_LEVEL[char] for char in token if char in BYTE_LEVEL)
        elif match := _BYTE_TOKEN.match(token):
            table[index] = bytes([int(match[1], 16)])
        else:
            table[index] = token.replace("▁", " ").encode()
    return table
