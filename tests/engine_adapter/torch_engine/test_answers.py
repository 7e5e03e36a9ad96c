"""Logprobs of tokens, and text from tokens. OpenAI's shapes: test_prepare.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine.answers import AnswerWriter, CompletionWriter, Detokenizer, Piece, TokenBytes
from engine_adapter.torch_engine.requests import Token

TOKENS = [
    Token(70, -0.5, ((70, -0.5), (71, float("-inf")))),
    Token(71, float("-inf"), ((70, -0.5), (72, -2.0))),
]


@pytest.fixture(scope="module")
def token_bytes(tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer)


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_piece_that_shows_nothing_is_no_chunk(token_bytes, logprobs):
    writer = AnswerWriter(token_bytes=token_bytes, model="m", with_logprobs=logprobs)
    assert bool(writer.piece(0, Piece("", TOKENS))) is logprobs
    assert writer.piece(0, Piece()) == b""


def test_each_part_of_a_character_has_its_bytes(tokenizer, token_bytes):
    parts = [Token(each, -1.0, ()) for each in tokenizer.encode("a\U0001f9ff", add_special_tokens=False)]
    entries = AnswerWriter(token_bytes=token_bytes, model="m").logprobs(0, parts)["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "a\U0001f9ff".encode()
    assert entries[1]["token"].startswith("\\xf0")


def test_completion_logprobs_and_their_offsets(tokenizer, token_bytes):
    out = CompletionWriter(token_bytes=token_bytes, model="m")
    first, second = out.logprobs(0, TOKENS[:1]), out.logprobs(0, TOKENS[1:])
    assert first["text_offset"] == [0]
    assert second["text_offset"] == [len(tokenizer.decode([70]))]
    assert second["token_logprobs"] == [-9999.0]
    texts = [tokenizer.decode([token]) for token in (70, 72, 71)]
    assert second["top_logprobs"] == [dict(zip(texts, [-0.5, -2.0, -9999.0], strict=True))]


def test_offsets_count_no_tokens_without_text(tokenizer, token_bytes):
    tokens = [Token(i, -1.0, ()) for i in (70, tokenizer.eos_token_id, 71)]
    writer = CompletionWriter(
        token_bytes=token_bytes, model="m", silent=frozenset([tokenizer.eos_token_id]), answered=[1, 2, 70]
    )
    size = len(tokenizer.decode([70]))
    assert writer.logprobs(0, tokens)["text_offset"] == [12 + size, 12 + 2 * size, 12 + 2 * size]


def test_offsets_count_characters_not_tokens(tokenizer, token_bytes):
    tokens = [Token(i, -1.0, ()) for i in tokenizer.encode("\U0001f9ff!", add_special_tokens=False)]
    offsets = CompletionWriter(token_bytes=token_bytes, model="m").logprobs(0, tokens)["text_offset"]
    assert offsets == [0] * (len(tokens) - 1) + [1]


# --- from tokens to text, piece by piece ---------------------------------------------------------------


def pieces(tokenizer, ids, stops=()):
    added = tokenizer.transformers.added_tokens_decoder
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    detokenizer = Detokenizer(tokenizer, stops, skipped=special)
    texts = []
    for token in ids:
        texts.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    return [*texts, detokenizer.finish()], detokenizer


@given(st.lists(st.integers(0, 4095), max_size=40), st.text(max_size=60) | st.just("漢字🙂🚀 zażółć\n\n b"))
def test_pieces_make_the_whole(tokenizer, any_ids, text):
    for ids in (any_ids, tokenizer.encode(text, add_special_tokens=False)):
        assert "".join(pieces(tokenizer, ids)[0]) == tokenizer.decode(ids, skip_special_tokens=True)


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


def test_the_start_of_a_stop_string_is_held_back_and_given_when_it_was_none(tokenizer):
    detokenizer = Detokenizer(tokenizer, ["a!b"])
    shown = [detokenizer.push(token) for token in tokenizer.encode("xa!", add_special_tokens=False)]
    assert "".join(shown) == "x"
    (question,) = tokenizer.encode("?", add_special_tokens=False)
    assert detokenizer.push(question) == "a!?"


@pytest.mark.parametrize(
    ("stop", "min_tokens", "shown"),
    [("a", 1, "ab"), ("a", 2, "ab"), ("a", 5, "ababa"), ("ba", 2, "a"), ("ba", 3, "aba"), ("ba", 4, "aba")],
)
def test_no_stop_string_ends_within_the_least_tokens(tokenizer, stop, min_tokens, shown):
    detokenizer = Detokenizer(tokenizer, [stop], min_tokens=min_tokens)
    ids = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ababa"]
    assert "".join([*map(detokenizer.push, ids), detokenizer.finish()]) == shown


def test_nothing_comes_after_a_stop(tokenizer):
    texts, detokenizer = pieces(tokenizer, tokenizer.encode("a b c", add_special_tokens=False), [" b"])
    assert "".join(texts) == "a"
    assert detokenizer.push(5) == ""
    assert detokenizer.finish() == ""


def test_bytes_that_never_make_a_character_hold_nothing_back(tokenizer):
    """They are shown, each as U+FFFD, and what a token costs does not grow with how many came."""
    lead = tokenizer.encode("é", add_special_tokens=False)[0]
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


def like_llama_2s():
    """A tokenizer that writes spaces as `▁` and rare characters as bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "o", "k", "▁o", "▁ok", "</s>"]
    vocab = {name: index for index, name in enumerate(names)}
    bpe = models.BPE(vocab, [("▁", "o"), ("▁o", "k")], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(bpe)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
    return ChatTokenizer(fast, source="here")


def test_tokens_of_a_tokenizer_like_llama_2s_are_the_text():
    tokenizer = like_llama_2s()
    ids = tokenizer.encode("ok ok 漢", add_special_tokens=False)
    assert b"".join(map(TokenBytes(tokenizer).of, ids)) == " ok ok 漢".encode()


@pytest.mark.parametrize("prompt", ["ok", "ok</s>", "漢", ""])
def test_the_first_space_of_an_answer_is_shown_after_a_prompt(prompt):
    tokenizer = like_llama_2s()
    end, ok = tokenizer.eos_token_id, tokenizer.transformers.convert_tokens_to_ids("▁ok")
    before = [*tokenizer.encode(prompt, add_special_tokens=False), end, tokenizer.vocab_size + 3]
    detokenizer = Detokenizer(tokenizer, skipped=frozenset([end]), after=before)
    shown = [detokenizer.push(token) for token in (ok, end, ok)] + [detokenizer.finish()]
    assert shown == [" ok" if prompt else "ok", "", " ok", ""]


@given(st.lists(st.integers(0, 4095), max_size=40), st.lists(st.integers(0, 4095), max_size=40))
def test_where_tokens_are_bytes_the_prompt_changes_no_answer(tokenizer, prompt, answer):
    alone, after = Detokenizer(tokenizer), Detokenizer(tokenizer, after=prompt)
    texts = ["".join([*map(each.push, answer), each.finish()]) for each in (alone, after)]
    assert texts[0] == texts[1]
