"""Finds out whether templates.py renders as the installed transformers does. Run where a tokenizer is loaded.

Three comparisons: the filters, tests, globals and tags that templates can use; what a template gets to see,
by a template that prints all of it; and the texts that the tokenizer's own templates make of test chats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import Environment
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_adapter.errors import ChatError
from engine_adapter.prompt.chat_messages import normalize_messages
from engine_adapter.prompt.content_format import content_format
from engine_adapter.prompt.templates import TEMPLATE_ERRORS, environment, render_template

# Prints all that a template is given, and what the environment makes of it.
_WITNESS = """
{%- set seen = namespace(roles=[], self=1) %}
  {% for message in messages %}
{{ message | tojson(indent=2) }}{{ message.keys() | list }}
    {% generation %}{% set seen.roles = seen.roles + [message.role] %}{{ message.content }}{% endgeneration %}
{% if loop.index > 20 %}{% break %}{% else %}{% continue %}{% endif %}
{% endfor %}
{{ seen.roles }}{{ seen.self }}{{ dict(a=1, **{'b': 'é<&>'}) | tojson(ensure_ascii=true, sort_keys=true) }}
{{ tools | tojson(separators=(',', ':')) }}{{ documents | tojson }}{{ add_generation_prompt }}
{{ [bos_token, eos_token, pad_token, unk_token, enable_thinking, strftime_now('%Y')] }}
{{ dict.fromkeys('ab', 1) }}{{ dict.items is defined }}
{{ messages | map(attribute='role') | join(',') | upper }}{{ '<b>' | e }}
"""
_REFUSES = "{{ raise_exception('no') }}"
_HIDES = "{% set n = namespace(_hidden=1) %}"

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a <city> — today's & tomorrow's",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Kraków", "days": [1, 2.5, true, null]}'},
}
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Kraków? 漢字 🙂 <b>\n\n"}]
_ANSWERED: list[dict[str, Any]] = [
    *_ASKED,
    {"role": "assistant", "content": " It rains,\n so stay. ", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": " so?"}]},
]
_CALLED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    *_ASKED,
    {"role": "assistant", "content": None, "reasoning_content": "Think.", "tool_calls": [_CALL]},
    {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"rain": 3}'},
]
_REASONED: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    *_ASKED,
    {"role": "assistant", "content": "A", "thinking": "T"},
    *_ASKED,
    {"role": "assistant", "content": "<think>\nI\n</think>\n\nB", "reasoning": "R"},
    *_ASKED,
]
_PARTIAL: list[dict[str, Any]] = [
    *_ASKED,
    {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]},
]
_CHATS: tuple[tuple[list[dict[str, Any]], dict[str, Any]], ...] = (
    (_ASKED, {}),
    (_ASKED, {"add_generation_prompt": False}),
    (_ANSWERED, {}),
    (_ANSWERED, {"enable_thinking": False, "thinking": True, "bos_token": "<other>"}),
    (_ANSWERED[:2], {"continue_final_message": True, "add_generation_prompt": False}),
    (_PARTIAL, {"continue_final_message": True, "add_generation_prompt": False}),
    (_CALLED, {"tools": [_TOOL]}),
    (_CALLED, {"tools": [_TOOL, _TOOL], "add_generation_prompt": False}),
    (_CALLED, {}),
    (_CALLED[1:], {"tools": [_TOOL]}),
    (_REASONED, {}),
    (_REASONED[1:], {"documents": [{"title": "D", "text": "E"}], "reasoning_effort": "low"}),
    (_REASONED[1:], {"documents": ["x"]}),
    ([*_ASKED, *_ASKED], {}),
    ([{"role": "wizard", "content": ""}], {}),
)


def renders_alike(tokenizer: Any) -> bool:  # noqa: ANN401 - transformers is untyped
    """True if templates.py gives what the transformers tokenizer gives, on every test chat."""
    own = tokenizer.chat_template
    templates = [*(own.values() if isinstance(own, dict) else [own] if own else [])]
    return _same_environment() and all(
        _text_of(_ours, tokenizer, template, *chat) == _text_of(_theirs, tokenizer, template, *chat)
        for template in (*templates, _WITNESS, _REFUSES, _HIDES)
        for chat in _normal_chats(template)
    )


def _same_environment() -> bool:
    """True if templates find the same names here and there."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415 - slow

        theirs: Environment = _compile_jinja_template("").environment
    except (ImportError, AttributeError):
        return False
    return _abilities(environment) == _abilities(theirs)


def _abilities(made: Environment) -> tuple[object, ...]:
    return (
        isinstance(made, ImmutableSandboxedEnvironment),
        *(frozenset(names) for names in (made.filters, made.tests, made.globals)),
        sorted(tag for extension in made.extensions.values() for tag in extension.tags),
        (made.trim_blocks, made.lstrip_blocks, made.keep_trailing_newline, made.autoescape),
        made.undefined.__name__,
    )


def _normal_chats(template: str) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    for messages, options in _CHATS:
        normal = normalize_messages(messages, content_format(template))
        yield normal.messages, {"add_generation_prompt": True, **options}


def _ours(tokenizer: Any, template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:  # noqa: ANN401
    known = ("tools", "documents", "add_generation_prompt", "continue_final_message")
    variables = {name: value for name, value in options.items() if name not in known}
    return render_template(
        template,
        messages,
        variables={**tokenizer.special_tokens_map, **variables},
        **{name: value for name, value in options.items() if name in known},
    )


def _theirs(tokenizer: Any, template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:  # noqa: ANN401
    text: str = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    return text


def _text_of(render: Callable[..., str], *chat: Any) -> str | None:  # noqa: ANN401 - transformers is untyped
    """The text; None where the chat is refused."""
    try:
        return render(*chat)
    except (ChatError, *TEMPLATE_ERRORS):
        return None
