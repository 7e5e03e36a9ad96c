"""Tells which chats all engines render in the same way; an engine is asked about the others.

Found by sending each form of chat to real servers, with the templates of 70 models, and reading the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine_adapter import JsonBody
from proxy.prompt.render import ChatInput, gives

# Fields of a chat that some engines give their template, or that change what it writes.
_SPECIAL = frozenset(
    {
        "reasoning",
        "reasoning_effort",
        "response_format",
        "tool_choice",
        "parallel_tool_calls",
        "json_schema",
        "grammar",
        "thinking",
        "task",
    }
)
# Roles and fields that all engines give their templates in the same form. Some engines leave out, rename or
# reorder the others, or join them differently.
_ROLES = ("system", "user", "assistant", "tool")
_OF_MESSAGES = frozenset({"role", "content", "tool_calls", "tool_call_id"})
_OF_TOOLS, _OF_FUNCTIONS = ["type", "function"], ["name", "description", "parameters"]
_OF_CALLS, _OF_CALLED = ["id", "type", "function"], ["name", "arguments"]
# Fields that replace a chat's template, or change what it adds.
_OWN_TEMPLATE = frozenset({"chat_template", "documents", "add_special_tokens"})
_INT64 = 2**63


def is_special(source: ChatInput, body: JsonBody) -> bool:
    """Whether engines may differ on the prompt of a chat: it does not end with a turn of the user's or a
    tool's, or it has fields or values that not all engines give their templates in the same form."""
    messages = source.messages
    last = messages[-1] if isinstance(messages, list) and messages else None
    continues = isinstance(last, dict) and last.get("role") == "assistant"
    if continues or not source.add_generation_prompt or has_own_template(body) or body.has_any(_SPECIAL):
        return True
    usual = isinstance(messages, list) and all(map(_is_usual, source.more))
    return not (usual and _are_usual_tools(source.tools) and _is_usual_json(source.template_kwargs))


def has_own_template(body: JsonBody) -> bool:
    """Whether a chat brings its own template, or changes what the template adds."""
    return gives(body, _OWN_TEMPLATE)


def _is_usual(message: object) -> bool:
    """Whether all engines read a message in the same way."""
    if not isinstance(message, dict):
        return False
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    given = {name for name, value in message.items() if value is not None and value != []}
    is_said = isinstance(content, str) or (role == "user" and _are_usual_parts(content))
    return (
        role in _ROLES
        and given <= _OF_MESSAGES
        and (is_said or (content is None and bool(calls)))
        and _are_usual_calls(calls)
    )


def _are_usual_parts(parts: object) -> bool:
    """Whether a message's parts all have a text; some engines leave out an empty one, others join it."""
    return (
        isinstance(parts, list)
        and bool(parts)
        and all(isinstance(part, dict) and part.get("text") for part in parts)
    )


def _are_usual_tools(tools: object) -> bool:
    if not tools:
        return True
    return _are_like(tools, _OF_TOOLS, _OF_FUNCTIONS) and _is_usual_json(tools)


def _are_usual_calls(calls: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether the calls of a message are usual, and their arguments are objects."""
    if not calls:
        return True
    return _are_like(calls, _OF_CALLS, _OF_CALLED) and all(
        _are_usual_arguments(call["function"]["arguments"]) for call in calls
    )


def _are_usual_arguments(text: object) -> bool:
    """Some engines refuse arguments that are no object, others give their template an empty one."""
    try:
        arguments = msgspec.json.decode(text) if isinstance(text, str) else None
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(arguments, dict) and _is_usual_json(arguments)


def _are_like(items: object, names: Sequence[str], of_function: Sequence[str]) -> bool:
    """Whether tools, or calls of tools, have exactly these fields in this order."""
    return isinstance(items, list) and all(
        isinstance(item, dict)
        and list(item) == names
        and isinstance(item["function"], dict)
        and list(item["function"]) == of_function
        for item in items
    )


def _is_usual_json(value: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether all engines write a value in the same way: not so fractions (1.0, 1e-7) and large integers."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, float) or (isinstance(each, int) and not -_INT64 <= each < _INT64):
            return False
    return True
