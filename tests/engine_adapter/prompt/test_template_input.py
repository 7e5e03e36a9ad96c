"""What an engine gives to a chat template differs from engine to engine."""

import pytest

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.template_input import USUAL, ContentFormat, TemplateInput
from tests.fake_engines.text import MODEL_DIR

PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer.load(str(MODEL_DIR))


def test_the_usual_one_is_the_tokenizer_itself(tokenizer):
    assert tokenizer.rendering(USUAL) is tokenizer
    assert "one\ntwo" in tokenizer.render([PARTS])


def test_what_joins_texts(tokenizer):
    assert "one two" in tokenizer.rendering(TemplateInput(joint=" ")).render([PARTS])


def test_tools_and_messages_as_the_engine_makes_them(tokenizer):
    given = TemplateInput(
        tools=lambda tools: [tool | {"more": None} for tool in tools],
        message=lambda message, wanted: message | {"content": f"{wanted} {message['content'].upper()}"},
    )
    text = tokenizer.rendering(given).render([PARTS], tools=[{"type": "function"}])
    assert '{"type": "function", "more": null}' in text
    assert "string ONE\nTWO" in text


def test_no_calls_are_as_no_field(tokenizer):
    said = {"role": "assistant", "content": "one"}
    assert tokenizer.render([said | {"tool_calls": []}]) == tokenizer.render([said])
    assert USUAL.message(said, ContentFormat.STRING) is said


def test_the_form_of_texts_is_the_engines_choice(tokenizer):
    with_parts = TemplateInput(content_format=lambda _: ContentFormat.PARTS)
    ids = tokenizer.rendering(with_parts)
    with pytest.raises(Exception, match="cannot render"):  # this template takes strings
        ids.render([PARTS])
