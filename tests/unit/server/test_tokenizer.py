"""Byte-level BPE, tokenizers in a folder and of plain bytes; chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dsagent.engine.chat_template import ChatTemplate, ChatTemplateError
from dsagent.engine.checkpoint import ModelNotLoadable
from dsagent.engine.detokenizer import Detokenizer
from dsagent.engine.hf_folder import read_tokenizer
from dsagent.engine.tiny import open_tiny
from dsagent.engine.tokenizer import TextTokenizer, byte_level_bpe

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
TOKENS = ("<s>", "</s>", *ALPHABET, "he", "llo", "lo", "hello")
BPE = TextTokenizer(
    byte_level_bpe(
        {token: index for index, token in enumerate(TOKENS)},
        [("h", "e"), ("l", "o"), ("l", "lo"), ("he", "llo")],
        special=["<s>", "</s>"],
        single_digits=True,
    ),
    ChatTemplate(TEMPLATE),
)


def decode(table: object, ids: list[int]) -> str:
    detokenizer = Detokenizer(table)  # type: ignore[arg-type]
    return "".join(detokenizer.push([index]) for index in ids) + detokenizer.finish()


@given(st.text(max_size=30))
def test_bpe_round_trip(text: str) -> None:
    said = decode(BPE.token_bytes, BPE.encode(text))
    assert said == text.replace("</s>", "").replace("<s>", "")


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=20))
def test_any_ids_decode_as_the_library_decodes_them(ids: list[int]) -> None:
    reference = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    reference.decoder = decoders.ByteLevel()
    reference.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>")])
    assert decode(BPE.token_bytes, ids) == reference.decode(ids)


def test_merges_special_tokens_and_single_digits() -> None:
    ids = BPE.encode("hello</s>12")
    assert [TOKENS[index] for index in ids] == ["hello", "</s>", "1", "2"]


def test_chat_writes_its_own_special_tokens() -> None:
    ids = BPE.encode_chat([{"role": "user", "content": "hello"}])
    assert [TOKENS[index] for index in ids] == ["<s>", "hello"]


def test_bytes() -> None:
    tokenizer = open_tiny().tokenizer
    ids = tokenizer.encode("é")
    assert ids == [256, 0xC3, 0xA9]
    assert decode(tokenizer.token_bytes, ids) == "é"
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert decode(tokenizer.token_bytes, chat) == "user: hi\nassistant: "


def test_a_folder_with_a_template_in_its_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.add_tokens([AddedToken("naïve", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain = read_tokenizer(tmp_path)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        plain.encode_chat([{"role": "user", "content": "hi"}])

    config = {"chat_template": "{{ bos_token }}" + TEMPLATE, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    folder = read_tokenizer(tmp_path)
    ids = folder.encode_chat([{"role": "user", "content": "naïve é"}])
    assert ids[:3] == [256, 256, 257]
    assert decode(folder.token_bytes, ids) == "naïve é"


def test_a_folder_with_sentencepiece_pieces(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "▁": 3, "▁caf": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = read_tokenizer(tmp_path)
    assert decode(folder.token_bytes, [4, 1, 2, 3]) == tokenizer.decode([4, 1, 2, 3]) == " café "


@pytest.mark.parametrize("content", [None, "{", "[]", '{"decoder": {"type": "WordPiece"}}'])
def test_a_folder_without_a_usable_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelNotLoadable, match="tokenizer"):
        read_tokenizer(tmp_path)


def test_templates_run_as_published_ones_expect() -> None:
    template = ChatTemplate(
        "{%- for m in messages %}\n    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{- m | tojson }}{% endfor %}{{ eos_token }}",
        eos_token="</s>",
    )
    messages = [{"role": "user", "content": "<é>"}] * 2
    assert template.render(messages) == '{"role": "user", "content": "<é>"}</s>'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_a_broken_template() -> None:
    with pytest.raises(ChatTemplateError, match="broken"):
        ChatTemplate("{% for %}")
