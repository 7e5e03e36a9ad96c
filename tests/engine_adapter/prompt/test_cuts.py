import pytest

from engine_adapter.errors import ChatError
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.cuts import AddedToken, cut_tokens, find_cut
from engine_adapter.types import token_array


def token(content, **options):
    return AddedToken(content, **({"normalized": False} | options))


def test_a_text_can_be_cut_before_a_token_that_is_found_as_it_stands():
    assert cut_tokens([token("<|im_start|>"), token("<|im_end|>")]) == ("<|im_start|>", "<|im_end|>")


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


class Tokenizer:
    """One token a character, except that `merged` is one token wherever it stands."""

    cuts = ("<s>", "<e>", "<b>")

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
    assert find_cut(Tokenizer()) == "<s>"


@pytest.mark.parametrize("text", [None, "no such token", "<b>begins the chat alone"])
def test_a_chat_without_cuts_is_encoded_whole(text):
    assert find_cut(Tokenizer(text)) is None


@pytest.mark.parametrize("merged", ["a<", "é<s>", " <s>", "<s><", "<e><s>"])
def test_a_cut_that_changes_ids_is_refused(merged):
    assert find_cut(Tokenizer(merged=merged)) is None


def test_the_default_tokenizer_cuts_before_each_message(tokenizer_dir):
    assert find_cut(ChatTokenizer.load(str(tokenizer_dir))) == "<|im_start|>"
