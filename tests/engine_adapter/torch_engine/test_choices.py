"""One choice, from the engine's outputs to pieces."""

from __future__ import annotations

from array import array

import pytest

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine.detokenize import Detokenizer
from engine_adapter.torch_engine.prepare import ChoiceReader, Echo
from engine_adapter.torch_engine.requests import Finished, PromptScores, Token
from engine_adapter.torch_engine.tool_calls import HERMES, MarkedCalls

END = 2
CALL = 'Hi <tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir) -> ChatTokenizer:
    return ChatTokenizer.load(str(tokenizer_dir))


@pytest.fixture
def make(tokenizer):
    def make(*, stops=(), **options):
        return ChoiceReader(Detokenizer(tokenizer, stops), end_tokens=frozenset({END}), **options)

    return make


@pytest.fixture
def tokens(tokenizer):
    return lambda text: [Token(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def test_pieces_hold_what_is_new(make, tokens):
    reader = make()
    reader.accept(tokens("hello"))
    assert reader.take().text == "hello"
    assert not reader.take()
    reader.accept([*tokens(" world"), Token(END), Finished("stop")])
    piece = reader.take()
    assert (piece.text, piece.finish_reason) == (" world", "stop")
    assert piece.tokens[-1].token_id == END
    assert reader.finish_reason == "stop"


def test_after_a_stop_string_nothing_counts(make, tokens):
    reader = make(stops=("b",))
    made = tokens("a b c d e")
    reader.accept([*made, Finished("length")])
    piece = reader.take()
    assert (piece.text, piece.finish_reason) == ("a ", "stop")
    assert reader.completion_tokens == len(piece.tokens) < len(made)


def test_a_call_ends_the_answer_as_one(make, tokens):
    reader = make(calls=MarkedCalls(HERMES))
    reader.accept([*tokens(CALL), Token(END), Finished("stop")])
    piece = reader.take()
    assert (piece.text, piece.finish_reason) == ("Hi", "tool_calls")
    assert [(call.name, call.arguments) for call in piece.calls] == [("f", '{"a":1}')]


def test_an_answer_that_was_cut_short_ends_so(make, tokens):
    reader = make(calls=MarkedCalls(HERMES))
    reader.accept([*tokens(CALL), Finished("length")])
    assert reader.take().finish_reason == "length"


@pytest.mark.parametrize("cut", range(0, 30, 3))
def test_a_choice_goes_on_inside_a_call(make, tokens, cut):
    made = tokens(CALL)
    whole = make(calls=MarkedCalls(HERMES))
    whole.accept(made[:cut])
    before = whole.take()
    rest = make(calls=MarkedCalls(HERMES), answered=[token.token_id for token in made[:cut]])
    rest.accept([*made[cut:], Finished("stop")])
    piece = rest.take()
    assert before.text + piece.text == "Hi"
    assert len(before.calls) + len(piece.calls) == 1


def test_an_echo_waits_for_its_logprobs(make, tokens):
    echo = Echo("ab", array("i", [5, 6, 7]))
    first, second = make(echo=echo), make(echo=echo)
    second.accept([*tokens("x"), Finished("length")])
    assert not first.take()
    assert not second.take()
    first.accept([PromptScores([(-1.0, ()), (-2.0, ())]), *tokens("y"), Finished("length")])
    for reader, text in ((first, "aby"), (second, "abx")):
        piece = reader.take()
        assert piece.text == text
        assert [(token.token_id, token.logprob) for token in piece.echoed] == [
            (5, None),
            (6, -1.0),
            (7, -2.0),
        ]
        assert piece.finish_reason == "length"


def test_an_echo_without_logprobs_and_without_an_answer(make, tokens):
    reader = make(echo=Echo("ab"), drops=True)
    reader.accept([*tokens("x"), Finished("length")])
    piece = reader.take()
    assert (piece.text, piece.tokens, piece.echoed, piece.finish_reason) == ("ab", [], [], "length")
    assert reader.completion_tokens == 0
