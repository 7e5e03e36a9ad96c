"""Which messages a chat template loses."""

import pytest

from engine_adapter.errors import ChatError
from engine_adapter.prompt.template_trials import MessageShape, kept_by, lost_shapes, writes_system_first
from engine_adapter.prompt.templates import TEMPLATE_ERRORS, render_template

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


TOOLS = "{% for t in tools %}{{ t.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "is_first"),
    [(EACH + TOOLS, True), (TOOLS + EACH, False), (EACH, False), (NONE + TOOLS, False), ("", False)],
)
def test_what_a_template_writes_first(template, is_first):
    def render(messages, tools):
        try:
            return render_template(template, messages=messages, tools=tools)
        except TEMPLATE_ERRORS as error:
            raise ChatError(str(error), param="messages") from error

    assert writes_system_first(render) is is_first
