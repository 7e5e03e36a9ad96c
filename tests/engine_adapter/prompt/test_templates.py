"""What is compared with transformers on every template is in test_templates_alike.py."""

import pytest
from jinja2 import TemplateError

from engine_adapter.prompt import sandbox, templates
from engine_adapter.prompt.template_input import ContentFormat
from engine_adapter.prompt.template_trials import content_format, looped
from engine_adapter.prompt.templates import TEMPLATE_ERRORS, compiled, render_template

ASKED = [{"role": "user", "content": "hello"}]
ROLES = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def test_a_variable_may_have_any_name_but_those_of_the_chat():
    template = "{{ template }} {{ variables }} {{ messages[0].role }}"
    variables = {"template": 1, "variables": 2, "messages": []}
    assert render_template(template, ASKED, variables=variables) == "1 2 user"


def test_the_originals_are_not_changed():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts, "name": None, "reasoning": "r"}]
    template = "{{ messages[0].content | map(attribute='text') | join }}{{ messages[0] | length }}"
    assert render_template(template, chat, continue_final_message=True) == "ab"
    assert chat == [{"role": "user", "content": parts, "name": None, "reasoning": "r"}]
    assert parts == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_a_continued_message_keeps_its_end_unless_the_template_trims_it():
    said = [*ASKED, {"role": "assistant", "content": "Well, \n"}]
    trimming = ROLES.replace("m.content", "m.content | trim")
    assert render_template(ROLES, said, continue_final_message=True) == "user:hello;assistant:Well, \n"
    assert render_template(trimming, said, continue_final_message=True) == "user:hello;assistant:Well,"


@pytest.mark.parametrize(
    ("template", "final", "reason"),
    [
        (ROLES, {"role": "assistant"}, "has no content"),
        (ROLES, {"role": "assistant", "content": [{"type": "image"}]}, "has no text"),
        ("{{ messages | length }}", {"role": "assistant", "content": "x"}, "does not read the content"),
        (ROLES.replace("m.content", "m.content[:3]"), {"role": "assistant", "content": "longer"}, "alters"),
    ],
)
def test_what_cannot_be_continued_is_an_error_that_shows_no_prompt(template, final, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        render_template(template, [*ASKED, final], continue_final_message=True)
    assert "hello" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template):
    """It fails, or what it reaches for is not there."""
    try:
        text = render_template(template, ASKED)
    except TEMPLATE_ERRORS:
        return
    assert text == ""


# Each call makes its block twice.
CALLS = "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
CALLS += "{% call f() %}" * 40 + "{% endcall %}" * 40


@pytest.mark.parametrize(
    "template",
    [
        "{{ 10**10 * 'a' }}",
        "{{ [1] * 10**9 }}",
        "{{ 10 ** 10000000000 }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        CALLS,
        "{% for a in [0] recursive %}{{ loop([0]) ~ loop([0]) if loop.depth < 60 }}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(9) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_fills_neither_time_nor_memory(template, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_S", 0.2)
    monkeypatch.setattr(templates, "MAX_CHARS", 1 << 20)
    with pytest.raises(TemplateError):
        render_template(template, [{"role": "user", "content": "a" * 1000}])


def test_a_text_of_many_pieces_is_whole():
    text = "{% for a in range(3000) %}{{ '' }}{% endfor %}{% for a in range(9000) %}{{ a }},{% endfor %}"
    assert render_template(text, []) == "".join(f"{a}," for a in range(9000))


def test_a_template_is_compiled_once(monkeypatch):
    assert compiled(ROLES) is compiled(ROLES)
    for _ in range(2):
        with pytest.raises(TemplateError):
            compiled("{% if %}")
        monkeypatch.setattr(templates.environment, "from_string", None)  # nor is one that is none


@pytest.mark.parametrize(
    "template",
    [
        "{# a #}" * 50_000,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ " + "1 + " * 5000 + "1 }}",
        "{% for m in messages %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}{% elif b %}" + "{% elif b %}" * 5000 + "{% endif %}",
    ],
    ids=["long", "deep", "a long sum", "deep loops", "many branches"],
)
def test_a_template_that_is_too_much_for_its_compiler_is_refused(template):
    with pytest.raises(TemplateError):
        render_template(template, ASKED)
    assert content_format(template) is ContentFormat.STRING
    looped(template)
