import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine_adapter.errors import ChatError
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.encoders import (
    AddedToken,
    FastokensEncoder,
    TransformersEncoder,
    cut_tokens,
    exact_encoder,
    find_cut,
)
from engine_adapter.torch_engine.model import DEFAULT_MODEL
from engine_adapter.types import token_array

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 o'clock, isn't it?",
    "def encode(text):\n    return [token for token in text.split()]\n",
    "Zażółć gęślą jaźń, größer, naïve café, Ελληνικά, русский текст, 漢字かな交じり文, 한국어, ไทย, हिन्दी 🙂",
] * 20
# Special tokens whole and in pieces, words, and anything Unicode has that a request can carry.
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.sampled_from(
            [*" \n\t\r", "  ", "\r\n", "'s", "'LL", "e\u0301", "👩\u200d👧", "\ufeff", "123", "½"]
        ),
        st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<|endoftext|>", "</s>", "<s>"]),
        st.sampled_from(["the", "ing", "def", " self", " return", "language", "    ", "://", "->", "..."]),
    ),
    max_size=24,
).map("".join)


def trained(normalizer=None, split=None, **options):
    """A byte-level BPE tokenizer as served models have them."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizer
    steps = [pre_tokenizers.Split(Regex(split), behavior="isolated")] if split else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **options)


@pytest.fixture(scope="module")
def default():
    return AutoTokenizer.from_pretrained(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def both(default):
    """The default tokenizer and one like a served model's, each with its fastest encoder."""
    return [(each, exact_encoder(each)) for each in (default, trained(normalizers.NFC(), QWEN))]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_the_fastest_encoder_gives_the_ids_of_transformers(both, text, special):
    for tokenizer, encoder in both:
        assert encoder.name == "fastokens"
        expected = tokenizer.encode(text, add_special_tokens=special)
        assert encoder.encode(text, add_special_tokens=special).tolist() == expected


def test_a_growing_chat_gives_the_same_ids_with_what_was_kept_of_its_turns(both):
    default, encoder = both[0]
    turns = random.Random(1)  # noqa: S311 - not for secrets
    text = ""
    for number in range(30):
        words = " ".join(turns.choices(CORPUS, k=3))
        text += f"<|im_start|>{('user', 'assistant')[number % 2]}\n{words}<|im_end|>\n"
        expected = default.encode(text, add_special_tokens=False)
        assert encoder.encode(text, add_special_tokens=False).tolist() == expected


@pytest.mark.parametrize(
    "text", ["a" * 100_000, " " * 100_000, "\n \n" * 30_000, "🙂" * 20_000, "x1" * 50_000]
)
def test_long_monotonous_texts(both, text):
    for tokenizer, encoder in both:
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert encoder.encode(text, add_special_tokens=False).tolist() == expected


def test_what_fastokens_does_not_implement_is_left_to_tokenizers():
    tokenizer = trained(normalizers.NFKC())
    encoder = exact_encoder(tokenizer)
    assert encoder.name == "tokenizers"
    assert encoder.encode("ﬁn ½", add_special_tokens=True).tolist() == tokenizer.encode("ﬁn ½")


def test_an_encoder_that_differs_on_a_probe_is_not_taken(default, monkeypatch):
    kept = FastokensEncoder.encode

    def differs(self, text, *, add_special_tokens):
        return kept(self, text.replace("½", "1/2"), add_special_tokens=add_special_tokens)

    monkeypatch.setattr(FastokensEncoder, "encode", differs)
    assert exact_encoder(default).name == "tokenizers"


def test_a_tokenizer_that_adds_to_what_its_backend_gives_is_asked_itself(default):
    class Shifted:
        """Gives other ids than the backend it shows."""

        backend_tokenizer = default.backend_tokenizer
        split_special_tokens = False

        def encode(self, text, add_special_tokens):
            return [token + 1 for token in default.encode(text, add_special_tokens=add_special_tokens)]

        def __len__(self):
            return len(default)

        get_added_vocab = default.get_added_vocab
        decode = default.decode

    encoder = exact_encoder(Shifted())
    assert isinstance(encoder, TransformersEncoder)
    assert encoder.encode("a", add_special_tokens=False).tolist() == Shifted().encode("a", False)


@pytest.mark.parametrize("split", [True, False])
def test_special_tokens_in_a_text_count_as_the_tokenizer_says(split):
    tokenizer = trained(split_special_tokens=split)
    encoder = exact_encoder(tokenizer)
    text = "a<|im_start|>b"
    ids = encoder.encode(text, add_special_tokens=False).tolist()
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert (1 in ids) is not split


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_long_text_is_encoded_in_the_calling_thread():
    code = f"""
import os
from pathlib import Path
from engine_adapter.prompt.encoders import FastokensEncoder
before = len(os.listdir("/proc/self/task"))
description = Path({str(DEFAULT_MODEL)!r}, "tokenizer.json").read_text()
encoder = FastokensEncoder(description, lambda: None, split_special_tokens=False)
encoder.encode("def encode(text): return 1234 # words\\n" * 20_000, add_special_tokens=False)
print(len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "0\n"


def token(content, **options):
    return AddedToken(content, **({"normalized": False} | options))


@pytest.mark.parametrize(
    "added",
    [
        [token("<s>", normalized=True)],
        [token("<s>", lstrip=True)],
        [token("\n\n")],
        [token("<s>"), token("<s>x")],  # the longer one is found in its place
        [token("<s>"), token("a<s")],  # one that begins before it reaches into it
        [token("<s>"), token("a<s>b")],  # or over it
        [token("aba")],  # two of them overlap
        [token("<s>"), token("word", single_word=True)],
        [token("")],
    ],
)
def test_no_cut_where_neighbours_decide(added):
    assert "<s>" not in cut_tokens(added)
    assert not {"\n\n", "aba", ""} & set(cut_tokens(added))


class OneACharacter:
    """One token a character, except that `merged` is one token wherever it stands."""

    cuts = ("<s>", "<e>", "<b>")

    @property
    def encoder(self):
        return self

    def __init__(self, text="<b><s>a<e><s>b<e><s>", merged="\0"):
        self.text = text
        self.merged = merged

    def render(self, messages):
        if self.text is None:
            raise ChatError("no template", param="messages")
        return self.text

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return token_array([ord(character) for character in text.replace(self.merged, "\1")])


def test_the_token_that_chats_contain_most_often_is_the_cut():
    assert find_cut(OneACharacter()) == "<s>"


@pytest.mark.parametrize(
    "chat",
    [
        *(OneACharacter(text) for text in (None, "no such token", "<b>begins the chat alone")),
        *(OneACharacter(merged=merged) for merged in ("a<", "é<s>", " <s>", "<s><", "<e><s>")),
    ],
    ids=lambda chat: f"{chat.text}, {chat.merged!r} merged",
)
def test_without_a_cut_or_where_it_changes_ids_chats_are_encoded_whole(chat):
    assert find_cut(chat) is None


def test_the_default_tokenizer_cuts_before_each_message(tokenizer_dir):
    assert find_cut(ChatTokenizer.load(str(tokenizer_dir))) == "<|im_start|>"
