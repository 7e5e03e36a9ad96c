from pathlib import Path

import pytest

import engine_adapter.torch_engine
from engine_adapter.prompt import template_check, templates
from engine_adapter.prompt.chat import load_transformers
from engine_adapter.prompt.template_check import renders_alike

DEFAULT = Path(engine_adapter.torch_engine.__file__).parent / "default_model"
# One a kind of the template languages' corners that served models use.
TEMPLATES = {
    "loop over parts": "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}",
    "none is a missing key": "{% for m in messages %}{{ m.name is defined }}{{ m.content }}{% endfor %}",
    "namespace": (
        "{% set n = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set n.last = loop.index0 %}{% endif %}{% endfor %}{{ n.last }}"
    ),
    "a block of what was generated has a scope": (
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    ),
    "white space around blocks": "  {% if tools %}\n  {{ tools | tojson(indent=4) }}\n  {% endif %}\n\n x\n",
    "the date": "{{ strftime_now('%d %b %Y') }}{{ bos_token }}{{ messages[-1].content }}",
    "errors": "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}x",
    "not a template": "{% if %}",
}


@pytest.fixture
def tokenizer():
    return load_transformers(str(DEFAULT))


def test_it_renders_as_transformers_does(tokenizer):
    assert renders_alike(tokenizer)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    assert renders_alike(tokenizer)


def test_templates_by_name_are_all_compared(tokenizer):
    tokenizer.chat_template = {"default": TEMPLATES["namespace"], "tool_use": TEMPLATES["reasoning"]}
    assert renders_alike(tokenizer)


def test_a_tokenizer_without_template_is_no_obstacle(tokenizer):
    tokenizer.chat_template = None
    assert renders_alike(tokenizer)


def test_a_class_that_renders_in_its_own_way_is_found(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda *_, **__: "own")
    assert not renders_alike(tokenizer)


@pytest.mark.parametrize(
    "alter",
    [
        lambda patch: patch.delitem(templates.environment.filters, "tojson"),
        lambda patch: patch.setitem(templates.environment.globals, "today", str),
        lambda patch: patch.setattr(templates.environment, "lstrip_blocks", False),
        lambda patch: patch.setattr(templates, "_REASONING", ("reasoning_content",)),
        lambda patch: patch.setitem(templates.environment.filters, "tojson", repr),
        lambda patch: patch.setitem(templates.environment.globals, "dict", dict),
    ],
    ids=["filter", "global", "blocks", "reasoning", "tojson", "dict"],
)
def test_rules_of_another_transformers_are_found(tokenizer, monkeypatch, alter):
    templates.compiled.cache_clear()
    alter(monkeypatch)
    tokenizer.chat_template = None  # whatever the template, it is the rules that differ
    try:
        assert not renders_alike(tokenizer)
    finally:
        templates.compiled.cache_clear()


def test_a_transformers_that_hides_its_rules_is_not_trusted(tokenizer, monkeypatch):
    from transformers.utils import chat_template_utils

    monkeypatch.delattr(chat_template_utils, "_compile_jinja_template")
    assert not template_check._same_environment()
