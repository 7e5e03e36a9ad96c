import pytest

from engine_adapter.errors import ChatError
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.template_input import USUAL, ContentFormat, TemplateInput
from engine_adapter.prompt.template_trials import content_format
from tests.fake_engines.text import MODEL_DIR

PARTS = {
    "loop over the key": "{% for m in messages %}{% for c in m['content'] %}{{ c }}{% endfor %}{% endfor %}",
    "loop over attribute": "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
    "alias of messages": (
        "{% set rest = messages[1:] %}{% set loop_messages = rest %}"
        "{% for m in loop_messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    ),
    "the name content": (
        "{% for m in messages %}{% set content = m.content %}"
        "{% for c in content %}{{ c }}{% endfor %}{% endfor %}"
    ),
    "macro by position": (
        "{% macro show(body) %}{% for c in body %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
    ),
    "macro by keyword": (
        "{% macro show(body=1) %}{% for c in body %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(body=m['content']) }}{% endfor %}"
    ),
}
STRING = {
    "plain": "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
    "other loops": "{% for t in tools %}{{ t }}{% endfor %}{% for m in messages %}{{ m.text }}{% endfor %}",
    "macro of other content": (
        "{% macro tool(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
        "{{ tool(tools) }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    "slice of content": "{% for m in messages %}{{ m.content[1:] }}{{ m[0] }}{% endfor %}",
    "broken": "{% for m in messages %}",
    "self-assignment": "{% set messages = messages %}{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", [*PARTS, *STRING])
def test_templates_that_loop_over_content_take_parts_and_others_text(name):
    expected = ContentFormat.PARTS if name in PARTS else ContentFormat.STRING
    assert content_format((PARTS | STRING)[name]) is expected


IN_PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer.load(str(MODEL_DIR))


def test_what_joins_texts_and_their_form_are_the_engines_choice(tokenizer):
    assert "one\ntwo" in tokenizer.render([IN_PARTS])
    assert "one two" in tokenizer.rendering(TemplateInput(joint=" ")).render([IN_PARTS])
    with_parts = tokenizer.rendering(TemplateInput(content_format=lambda _: ContentFormat.PARTS))
    with pytest.raises(ChatError, match="cannot render"):  # this template takes strings
        with_parts.render([IN_PARTS])


def test_tools_and_messages_as_the_engine_makes_them(tokenizer):
    given = TemplateInput(
        tools=lambda tools: [tool | {"more": None} for tool in tools],
        message=lambda message, wanted: message | {"content": f"{wanted} {message['content'].upper()}"},
    )
    text = tokenizer.rendering(given).render([IN_PARTS], tools=[{"type": "function"}])
    assert '{"type": "function", "more": null}' in text
    assert "string ONE\nTWO" in text


def test_no_calls_are_as_no_field(tokenizer):
    said = {"role": "assistant", "content": "one"}
    assert tokenizer.render([said | {"tool_calls": []}]) == tokenizer.render([said])
    assert USUAL.message(said, ContentFormat.STRING) is said
