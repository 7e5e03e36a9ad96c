"""Renders chat templates by the rules of transformers, without importing it.

transformers takes 35 MB and a second of a core, and has no limits of time and memory. A template needs of it
only a jinja2 environment and the way messages are prepared, which are written here as transformers 5 has
them. Tests compare both. Whether an engine has the same rules, its own ids show (proxy/prompt/exactness.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.utils import Namespace

from engine_adapter.prompt.sandbox import (
    BOUNDED_FILTERS,
    Sandbox,
    begin_rendering,
    bounded_lipsum,
    checked_filter,
)
from engine_adapter.prompt.template_input import is_text

TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""The errors that rendering raises. A template is a program: it can fail on messages it does not expect."""

# The longest text of a chat: many times the longest body.
MAX_CHARS = 256 << 20
# The most spaces by which JSON may be indented for each level.
MAX_INDENT = 64
# Pieces of a text between two looks at its length.
_PIECES = 64
# A message's reasoning is read under the first of these names that it has, and given under all but the last.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# White space of C's `isspace`.
_SPACE = " \t\n\r\v\f"
# Ends the text to continue; what the template writes after it is cut off.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def choose_template(templates: str | Mapping[str, str] | None, tools: object) -> str:
    """The template for a chat with these tools. Raises ValueError if there is none."""
    if isinstance(templates, str):
        return templates
    if isinstance(templates, Mapping):
        name = "tool_use" if tools is not None and "tool_use" in templates else "default"
        templates = templates.get(name)
    if templates is None:
        raise ValueError("the tokenizer has no chat template")
    return templates


def render_template(
    template: str,
    messages: Iterable[Mapping[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
    ascii_space: bool = False,
) -> str:
    """The text of a chat. All values must be plain JSON: the sandbox does not guard other objects.

    The template gets all arguments, and `variables` by name. It gets the messages themselves, because the
    sandbox keeps it from changing them. With `continue_final_message`, the text ends within the last
    message's content. `ascii_space`: see TemplateInput. Raises one of TEMPLATE_ERRORS if the template or its
    rules refuse the messages."""
    chat = [_prepared(message) for message in messages]
    final = _mark_end(chat, template) if continue_final_message else ""
    if documents is not None and not all(isinstance(document, dict) for document in documents):
        raise TypeError("documents must be a list of objects")
    used = _ascii_environment if ascii_space else environment
    made = compiled(template, used)
    # Does the same as `made.render`, which lists and copies the globals: half the time of a short chat.
    seen = {
        **used.globals,
        **variables,
        "messages": chat,
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    begin_rendering()
    text = _bounded(made.root_render_func(Context(used, seen, made.name, made.blocks)))
    return _cut_at_end(text, final, used.space) if continue_final_message else text


def compiled(template: str, used: Sandbox | None = None) -> Template:
    """The compiled template. Raises TemplateError where it is not one."""
    made = _compiled(template, used or environment)
    if isinstance(made, str):
        raise TemplateError(made)
    return made


@lru_cache(maxsize=64)
def _compiled(template: str, used: Sandbox) -> Template | str:
    """The template, or why it is none: what is too much for Python's compiler is found out only once."""
    try:
        return used.from_string(template)
    except (TemplateError, SyntaxError, MemoryError, RecursionError) as error:
        return str(error) or type(error).__name__


def _bounded(pieces: Iterator[str]) -> str:
    """The text of the pieces. Raises TemplateError if it becomes too long."""
    text: list[str] = []
    size = 0
    while more := list(islice(pieces, _PIECES)):
        text += more
        size += sum(map(len, more))
        if size > MAX_CHARS:
            raise TemplateError(f"it makes a text of over {MAX_CHARS >> 20} Mi characters")
    return "".join(text)


def _prepared(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message without keys that hold None, whose reasoning has the names that templates read."""
    if is_text(message) or (None not in message.values() and message.keys().isdisjoint(_REASONING)):
        return message
    known = {key: value for key, value in message.items() if value is not None}
    reasoning = next((known[key] for key in _REASONING if key in known), None)
    if reasoning is not None:
        known = {"thinking": reasoning, **known, "reasoning_content": reasoning}
    return known


def _mark_end(chat: list[Mapping[str, Any]], template: str) -> str:
    """Appends the tag to the last message's content, or to its last text part; returns the text before it."""
    content = chat[-1].get("content")
    if content is None:
        raise ValueError("the final message has no content to continue")
    if "content" not in template:
        raise ValueError("the template does not read the content that is to be continued")
    if not isinstance(content, list):
        chat[-1] = {**chat[-1], "content": content + _CONTINUE_TAG}
        return str(content)
    for index in reversed(range(len(content))):
        if "text" in content[index]:
            text: str = content[index]["text"]
            marked = {**content[index], "text": text + _CONTINUE_TAG}
            chat[-1] = {**chat[-1], "content": [*content[:index], marked, *content[index + 1 :]]}
            return text
    raise ValueError("the final message has no text to continue")


def _cut_at_end(text: str, final: str, space: str | None) -> str:
    """The text up to the tag. A template that trimmed the tag's own space trimmed the message's, too."""
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise ValueError("the chat template leaves out or alters the final message, which is to be continued")
    at = text.rindex(tag)
    return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip(space)


# --- the environment -----------------------------------------------------------------------------------


class _Generation(Extension):
    """The tag `{% generation %}` around what the assistant wrote. Its body has a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it this way

    def parse(self, parser: Parser) -> nodes.Node:
        """The tag's body, as a block that is called."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _Dict:
    """`dict` in templates, without the type's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as the template has it
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: object = None, /) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` in templates, without attributes that begin with an underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the template has it
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401 - as the template has it
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template must not set the attribute {name!r} of a namespace")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Python writes it; jinja2's own filter escapes HTML."""
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise SecurityError(f"a chat template must not indent JSON by more than {MAX_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _environment() -> Sandbox:
    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters |= {**BOUNDED_FILTERS, "tojson": checked_filter(_tojson)}
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),  # noqa: DTZ005 - local time
        "dict": _Dict(),
        "lipsum": bounded_lipsum,
        "namespace": _Namespace,
    }
    return made


environment, _ascii_environment = _environment(), _environment()
"""Sandboxed, for templates are programs of whoever made the model."""
_ascii_environment.space = _SPACE
_ascii_environment.filters["trim"] = lambda value, chars=_SPACE: str(value).strip(chars)
