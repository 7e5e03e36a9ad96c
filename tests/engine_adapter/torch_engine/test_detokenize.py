"""Incremental text against the whole text, and stop strings against a plain search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine.answers import (
    Detokenizer,
    TextOffsets,
    TokenBytes,
    shown,
)


def special_ids(tokenizer):
    return frozenset(i for i, token in tokenizer.transformers.added_tokens_decoder.items() if token.special)


def pieces(tokenizer, ids, stops=()):
    detokenizer = Detokenizer(tokenizer, stops, skipped=special_ids(tokenizer))
    texts = []
    for token in ids:
        texts.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    return [*texts, detokenizer.finish()], detokenizer


@given(st.data())
def test_pieces_make_the_whole(tokenizer, data):
    text = data.draw(st.text(max_size=60) | st.sampled_from(["漢字🙂🚀 ok", "zażółć", "  a\n\n b"]))
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts, _ = pieces(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=True) == text


@given(st.data())
def test_any_tokens_make_the_text_of_the_whole(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    texts, _ = pieces(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=True)


@given(
    st.text(alphabet="ab🙂 ", max_size=40),
    st.lists(st.text(alphabet="ab🙂 ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string(tokenizer, text, stops):
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts, detokenizer = pieces(tokenizer, ids, stops)
    shown = "".join(texts)
    assert detokenizer.stopped == any(stop in text for stop in stops)
    if detokenizer.stopped:
        # Of two stop strings in one token, the first counts. A later token may complete an earlier one.
        assert text.startswith(shown)
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
        assert not any(stop in shown for stop in stops)
    else:
        assert shown == text


def test_of_two_stop_strings_in_one_token_the_first_counts(tokenizer):
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    token, text = next(each for each in texts.items() if len(each[1]) == len(set(each[1])) > 2)
    assert Detokenizer(tokenizer, [text[-1], text[1]]).push(token) == text[0]


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    ids = tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    assert len(ids) > 1
    texts, _ = pieces(tokenizer, ids)
    assert texts == [*[""] * (len(ids) - 1), "\U0001f9ff", ""]


def test_an_unfinished_character_shows_at_the_end(tokenizer):
    ids = tokenizer.encode("a\U0001f9ff", add_special_tokens=False)[:-1]
    texts, _ = pieces(tokenizer, ids)
    assert "".join(texts[:-1]) == "a"
    assert set(texts[-1]) == {"\ufffd"}


def test_the_start_of_a_stop_string_is_held_back_and_given_when_it_was_none(tokenizer):
    detokenizer = Detokenizer(tokenizer, ["a!b"])
    shown = [detokenizer.push(token) for token in tokenizer.encode("xa!", add_special_tokens=False)]
    assert "".join(shown) == "x"
    (question,) = tokenizer.encode("?", add_special_tokens=False)
    assert detokenizer.push(question) == "a!?"


def test_held_text_is_given_at_the_end(tokenizer):
    texts, detokenizer = pieces(tokenizer, tokenizer.encode("xa!", add_special_tokens=False), ["a!b"])
    assert texts[-1] == "a!"
    assert not detokenizer.stopped


def test_nothing_comes_after_a_stop(tokenizer):
    texts, detokenizer = pieces(tokenizer, tokenizer.encode("a b c", add_special_tokens=False), [" b"])
    assert "".join(texts) == "a"
    assert detokenizer.push(5) == ""
    assert detokenizer.finish() == ""


def _token_of(tokenizer, byte):
    """The token of one byte."""
    found = tokenizer.encode(bytes([byte]).decode("latin-1"), add_special_tokens=False)
    whole = tokenizer.encode("é", add_special_tokens=False)
    return found[0] if byte < 0x80 else whole[byte != 0xC3]


def test_bytes_that_never_make_a_character_hold_nothing_back(tokenizer):
    """They are shown, each as U+FFFD, and what a token costs does not grow with how many came."""
    lead = _token_of(tokenizer, 0xC3)
    texts, longest = counted(tokenizer, [lead] * 400)
    assert longest <= 16
    assert sum(map(bool, texts)) > 90
    assert "".join(texts) == tokenizer.decode([lead] * 400)


@pytest.mark.parametrize("silent", ["special", "unknown"])
def test_tokens_without_text_make_no_later_token_dearer(tokenizer, silent):
    token = tokenizer.eos_token_id if silent == "special" else tokenizer.vocab_size + 5
    (letter,) = tokenizer.encode("x", add_special_tokens=False)
    texts, longest = counted(tokenizer, [letter, *[token] * 400, letter])
    assert longest <= 16
    assert "".join(texts) == "xx"


def counted(tokenizer, ids):
    """The pieces of text, and the most tokens that were decoded at once."""
    decoded = []

    class Counting:
        transformers = tokenizer.transformers
        vocab_size = tokenizer.vocab_size

        def decode(self, ids, **options):
            decoded.append(len(ids))
            return tokenizer.decode(ids, **options)

    return pieces(Counting(), ids)[0], max(decoded)


@given(st.lists(st.sampled_from([0xC3, 0xA9, 0x41, 0x20]), max_size=60))
def test_broken_and_whole_characters_in_any_order(tokenizer, data):
    ids = [_token_of(tokenizer, byte) for byte in data]
    texts, _ = pieces(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids)


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
