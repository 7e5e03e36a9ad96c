"""Which prompts engines make of the same fields in the same way, and which only the engine itself knows.

The common forms of chats were found by sending each form to real servers, with the templates of 70 models,
and by reading the others. An engine is asked about all other chats.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from engine_adapter.body import JsonBody

# Fields that make the prompt, or the namespace of its KV, in a way that only the engine knows.
_OF_THE_ENGINE = frozenset(
    {
        "prompt_embeds",
        "input_embeds",
        "input_ids",
        "prompt_token_ids",
        "truncate_prompt_tokens",
        "suffix",
        "lora_path",
        "lora_request",
        "extra_key",
    }
)
_OF_THE_ENGINE_IN_COMPLETIONS = _OF_THE_ENGINE - {"prompt_embeds"}
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


def gives(body: JsonBody, names: AbstractSet[str]) -> bool:
    """Whether any of these fields has a value."""
    return body.has_any(names) and any(body.get(name) is not None for name in names)


def only_the_engine_knows(body: JsonBody, *, completion: bool = False) -> bool:
    """Whether fields of the engine's own make the prompt. vLLM takes the ids that another server computed."""
    transfer = body.get("kv_transfer_params")
    brings_token_ids = isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None
    return brings_token_ids or gives(body, _OF_THE_ENGINE_IN_COMPLETIONS if completion else _OF_THE_ENGINE)


def has_own_template(body: JsonBody) -> bool:
    """Whether a chat brings its own template, or changes what the template adds."""
    return gives(body, _OWN_TEMPLATE)


def is_common_form(body: JsonBody, not_plain: Sequence[Any]) -> bool:
    """Whether all engines make the same prompt of a chat. It must end with a turn of the user's or a tool's,
    and have only fields and values that all of them give their templates in the same form.

    `not_plain` are those of its messages that are more than a text.
    """
    messages = body.view("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if (
        (isinstance(last, dict) and last.get("role") == "assistant")
        or body.get("continue_final_message") is True
        or body.get("add_generation_prompt") is False
        or has_own_template(body)
        or body.has_any(_SPECIAL)
    ):
        return False
    usual = isinstance(messages, list) and all(map(_is_usual, not_plain))
    tools, template_kwargs = body.view("tools"), body.view("chat_template_kwargs")
    usual = usual and (not tools or _are_like(tools, _OF_TOOLS, _OF_FUNCTIONS))
    return usual and _is_usual_json([tools, template_kwargs])


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
