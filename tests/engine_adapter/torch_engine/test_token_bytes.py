"""The bytes of tokens of the kinds of tokenizers there are."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine.detokenize import TextOffsets, TokenBytes, shown

TEXT = "größe 漢字\U0001f9ff <|im_end|> ok\n"


@pytest.fixture(scope="module")
def sentencepiece() -> ChatTokenizer:
    """A tokenizer like Llama 2's: spaces as `▁`, rare characters as bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "o", "k", "▁o", "▁ok"]
    vocab = {name: index for index, name in enumerate(names)}
    bpe = models.BPE(vocab, [("▁", "o"), ("▁o", "k")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return ChatTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"), source="sentencepiece"
    )


def test_byte_level_tokens_are_the_text(tokenizer):
    token_bytes = TokenBytes(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(token_bytes.of, ids)) == TEXT.encode()


def test_sentencepiece_tokens_are_the_text_with_its_spaces(sentencepiece):
    token_bytes = TokenBytes(sentencepiece)
    ids = sentencepiece.encode("ok ok 漢", add_special_tokens=False)
    assert b"".join(map(token_bytes.of, ids)) == " ok ok 漢".encode()


def test_bytes_that_are_no_character_are_written_out():
    assert shown("漢".encode()[:2]) == r"\xe6\xbc"
    assert shown("漢".encode()) == "漢"


def test_a_token_inside_a_character_begins_where_that_does():
    first, rest = "漢".encode()[:1], "漢".encode()[1:]
    offsets = TextOffsets()
    assert [offsets.next(token) for token in (b"ab", first, rest, b"c")] == [0, 2, 2, 3]
