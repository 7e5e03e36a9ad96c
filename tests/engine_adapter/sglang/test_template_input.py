"""Chats as SGLang 0.5.23 gives them to templates, seen there; tests/sglang_live compares whole prompts."""

import pytest

from engine_adapter.prompt.template_input import ContentFormat
from engine_adapter.sglang.requests import SGLANG_INPUT

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (FUNCTION, FUNCTION),
        ({"name": "f"}, {"name": "f", "description": None, "parameters": None}),
        (FUNCTION | {"strict": None, "unknown": 1}, FUNCTION),
        (FUNCTION | {"strict": True}, FUNCTION | {"strict": True}),
        ("no function", "no function"),
    ],
)
def test_a_tool_has_the_fields_of_its_model_in_the_clients_order(function, given):
    (tool,) = SGLANG_INPUT.tools([{"function": function}])
    expected = {"type": "function", "function": given, "defer_loading": None}
    assert (tool, list(tool)) == (expected, list(expected))
    assert list(tool["function"]) == list(given)


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ({"role": "user", "content": "hi", "name": "ada"}, {"role": "user", "content": "hi"}),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        (
            {"content": "4", "role": "tool", "tool_call_id": "c"},
            {"role": "tool", "content": "4", "tool_call_id": "c"},
        ),
        (
            {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "tool", "content": "a b"},
        ),
    ],
)
def test_a_message_has_the_fields_of_its_model_that_are_given(message, given):
    assert list(SGLANG_INPUT.message(message, ContentFormat.STRING).items()) == list(given.items())


def test_a_call_has_an_index():
    call = {"type": "function", "function": {"arguments": {"a": 1}, "name": "f"}, "id": "c"}
    given = SGLANG_INPUT.message(
        {"role": "assistant", "content": "", "tool_calls": [call]}, ContentFormat.STRING
    )["tool_calls"]
    assert str(given) == str(
        [{"id": "c", "index": None, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    )


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ContentFormat.STRING),
        ("{% for m in messages %}{% for c in m.content %}x{% endfor %}{% endfor %}", ContentFormat.PARTS),
        ("{% for c in message['content'] | list %}x{% endfor %}", ContentFormat.PARTS),
        (
            "{% for turn in messages %}{% for c in turn.content %}x{% endfor %}{% endfor %}",
            ContentFormat.STRING,
        ),
        ("{{ messages }} {# no vision #}", ContentFormat.PARTS),
        ("{% for", ContentFormat.STRING),
    ],
)
def test_parts_go_to_templates_that_name_media_or_loop_over_a_content_of_a_known_name(template, form):
    assert SGLANG_INPUT.content_format(template) is form
