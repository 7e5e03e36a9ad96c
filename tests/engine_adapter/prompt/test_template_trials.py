"""What chat templates take: text or parts, and which messages they lose."""

import pytest

from engine_adapter.errors import ChatError
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.template_input import USUAL, ContentFormat, TemplateInput
from engine_adapter.prompt.template_trials import (
    MessageShape,
    content_format,
    kept_by,
    lost_shapes,
    writes_system_first,
)
from engine_adapter.prompt.templates import TEMPLATE_ERRORS, render_template
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


# --- messages that a template loses -------------------------------------------------------------------------


EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"
# The first message may be a system message, and further ones are refused, as Qwen3.5's template does it.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}"
    "{% elif m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
# Others are left out without a word.
SILENT = (
    "{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
# No system message, and turns alternate, as in Gemma's.
NONE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DEVELOPER_ONLY_FIRST = EACH.replace(
    "<{{", "{% if m.role == 'developer' and not loop.first %}{% continue %}{% endif %}<{{"
)
# As in Mistral's.
NO_USER_AFTER_A_RESULT = EACH.replace(
    "<{{", "{% if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'tool' %}"
    "{{ raise_exception('alternate') }}{% endif %}<{{"
)  # fmt: skip
TOOLS_OF_CALLS = (
    "{% set ns = namespace(called=false) %}{% for m in messages %}"
    "{% if m.tool_calls %}{% set ns.called = true %}{% endif %}"
    "{% if m.role == 'tool' and not ns.called %}{{ raise_exception('no call') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | default('None') }}{{ m.tool_calls }}{% endfor %}"
)
TOOLS = {MessageShape.CALL, MessageShape.LONE_RESULT}
SYSTEMS = {MessageShape.SEVERAL_SYSTEMS, MessageShape.LATE_SYSTEM, MessageShape.DEVELOPER}


def rendering(template):
    def render(messages):
        try:
            return render_template(template, messages, variables={}, add_generation_prompt=True)
        except TEMPLATE_ERRORS as error:
            raise ChatError(str(error), param="messages") from error

    return render


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        (EACH, set()),
        (STRICT, SYSTEMS | TOOLS),
        (SILENT, SYSTEMS | TOOLS),
        (NONE, {*MessageShape} - {MessageShape.NULL_CONTENT}),
        (NO_USER_AFTER_A_RESULT, {MessageShape.TURNS}),
        (TOOLS_OF_CALLS, {MessageShape.LONE_RESULT, MessageShape.NULL_CONTENT}),
        (DEVELOPER_ONLY_FIRST, {MessageShape.DEVELOPER}),
        (EACH.replace("{{ m.tool_calls }}", ""), {MessageShape.CALL}),
        ("{{ raise_exception('never') }}", set()),
        ("{{ messages[-1].content }}", set()),
    ],
)
def test_what_is_refused_or_left_out(template, lost):
    assert lost_shapes(kept_by(rendering(template))) == lost


NAMED = "{% for t in tools %}{{ t.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "is_first"),
    [(EACH + NAMED, True), (NAMED + EACH, False), (EACH, False), (NONE + NAMED, False), ("", False)],
)
def test_what_a_template_writes_first(template, is_first):
    def render(messages, tools):
        try:
            return render_template(template, messages=messages, tools=tools)
        except TEMPLATE_ERRORS as error:
            raise ChatError(str(error), param="messages") from error

    assert writes_system_first(render) is is_first
