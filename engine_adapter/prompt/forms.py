"""The forms that a prompt can have. Which of them kvpin makes as the engine does is found out form by form:
see proxy/prompt/trust.py.

The common forms of chats were found by sending each form to real servers, with the templates of 70 models,
and by reading the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Any

import msgspec

from engine_adapter.body import BILLING, JsonBody, is_said
from engine_adapter.off_loop import JsonInStrings
from engine_adapter.prompt.template_input import is_text


class Form(StrEnum):
    """A feature of a prompt that engines may tokenise, or give the chat template, in ways of their own."""

    TEXT = "text"
    """The text of a completion."""
    PLAIN = "plain"
    """A chat. All chats have this form, and most only this one."""
    TEXT_PARTS = "text parts"
    """A user's message in several parts of text."""
    TOOLS = "tools"
    """Tools that the model may call."""
    TOOL_CALLS = "tool calls"
    """Calls of tools and their results."""
    CONTINUED = "continued"
    """A chat that does not end with a turn of the user's or a tool's, or gets no generation prompt."""
    SPECIAL_TOKENS = "special tokens"
    """Texts that contain special tokens of the model."""
    REASONING = "reasoning"
    """Messages with the thoughts of the model in `reasoning_content`."""
    TEMPLATE_KWARGS = "template kwargs"
    """Values for the chat template in `chat_template_kwargs`, such as `enable_thinking`."""
    LEFT_OUT = "left out"
    """Fields of messages that hold null or an empty list, and the `BILLING` line: some engines drop them."""
    DOCUMENTS = "documents"
    """Fields that replace the chat template, or change what it adds."""
    OTHER = "other"
    """Fields, roles or values that some engines leave out, rename, reorder or join differently."""


_PLAIN, _CONTINUED = frozenset({Form.PLAIN}), frozenset({Form.PLAIN, Form.CONTINUED})
# Fields that make the prompt, or the namespace of its KV, in a way that only the engine knows.
_OF_THE_ENGINE = frozenset(
    {
        "prompt_embeds", "input_embeds", "input_ids", "prompt_token_ids", "truncate_prompt_tokens", "suffix",
        "lora_path", "lora_request", "extra_key",
    }
)  # fmt: skip
_OF_THE_ENGINE_IN_COMPLETIONS = _OF_THE_ENGINE - {"prompt_embeds"}
# Fields of a chat that some engines give their template, or that change what it writes.
_SPECIAL = frozenset(
    {
        "reasoning", "reasoning_effort", "response_format", "tool_choice", "parallel_tool_calls",
        "json_schema", "grammar", "thinking", "task",
    }
)  # fmt: skip
# Roles and fields that all engines give their templates in the same form. Some engines leave out, rename or
# reorder the others, or join them differently.
_ROLES = ("system", "user", "assistant", "tool")
_OF_MESSAGES = frozenset({"role", "content", "tool_calls", "tool_call_id", "reasoning_content"})
_OF_TOOLS, _OF_FUNCTIONS = ["type", "function"], ["name", "description", "parameters"]
_OF_PARTS = {"type", "text"}
_OF_CALLS, _OF_CALLED = ["id", "type", "function"], ["name", "arguments"]
# Fields that replace a chat's template, or change what it adds.
_OWN_TEMPLATE = frozenset({"chat_template", "documents", "add_special_tokens"})
_INT64 = 2**63


def gives(body: JsonBody, names: AbstractSet[str]) -> bool:
    """True if any of these fields has a value."""
    return body.has_any(names) and any(body.get(name) is not None for name in names)


def only_the_engine_knows(body: JsonBody, *, completion: bool = False) -> bool:
    """True if fields of the engine's own make the prompt. vLLM takes the ids that another server computed."""
    if body.is_plain:
        return False
    transfer = body.get("kv_transfer_params")
    brings_token_ids = isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None
    return brings_token_ids or gives(body, _OF_THE_ENGINE_IN_COMPLETIONS if completion else _OF_THE_ENGINE)


def not_plain(body: JsonBody) -> list[Any]:
    """The messages of a chat that are more than a text that someone says, found once: most are not, and need
    no other look. Raises UnreadableField if the messages cannot be decoded."""
    if body.is_plain:
        return []
    found: list[Any] | None = body.notes.get("not plain")
    if found is None:
        messages = body.view("messages")
        found = body.notes["not plain"] = [
            each
            for each in (messages if isinstance(messages, list) else ())
            if type(each) is not dict or not is_text(each) or not is_said(each)
        ]
    return found


def forms_of(body: JsonBody) -> frozenset[Form]:
    """The forms of a chat, without SPECIAL_TOKENS, which depend on the model."""
    messages = body.view("messages")
    if body.is_plain:
        return _CONTINUED if messages[-1]["role"] == "assistant" else _PLAIN
    last = messages[-1] if isinstance(messages, list) and messages else None
    tools, template_kwargs = body.view("tools"), body.view("chat_template_kwargs")
    strings = JsonInStrings()
    found = {form for message in not_plain(body) for form in _forms_of(message, strings)}
    if (
        (isinstance(last, dict) and last.get("role") == "assistant")
        or body.get("continue_final_message") is True
        or body.get("add_generation_prompt") is False
    ):
        found.add(Form.CONTINUED)
    if gives(body, _OWN_TEMPLATE):
        found.add(Form.DOCUMENTS)
    if isinstance(template_kwargs, dict) and template_kwargs:
        # Some engines take these two values for none.
        unset = any(value is None or value == "auto" for value in template_kwargs.values())
        found.add(Form.OTHER if unset else Form.TEMPLATE_KWARGS)
    if tools:
        found.add(Form.TOOLS if _are_like(tools, _OF_TOOLS, _OF_FUNCTIONS) else Form.OTHER)
    is_usual = isinstance(messages, list) and _is_usual_json(tools) and _is_usual_json(template_kwargs)
    if body.has_any(_SPECIAL) or not is_usual:
        found.add(Form.OTHER)
    return _PLAIN | found if found else _PLAIN


def _forms_of(message: object, strings: JsonInStrings) -> tuple[Form, ...]:
    """The forms that a message adds to its chat."""
    if not isinstance(message, dict):
        return (Form.OTHER,)
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    thoughts = message.get("reasoning_content")
    found = []
    if role == "system" and isinstance(content, str) and content.startswith(BILLING):
        found.append(Form.LEFT_OUT)
    if role == "user" and _are_usual_parts(content):
        found.append(Form.TEXT_PARTS)
    elif not isinstance(content, str) and (content is not None or not calls):
        found.append(Form.OTHER)
    if role == "tool" or calls:
        is_usual = (role == "assistant" and _are_usual_calls(calls, strings)) or (
            role == "tool" and not calls
        )
        found.append(Form.TOOL_CALLS if is_usual else Form.OTHER)
    if thoughts is not None:
        is_usual = role == "assistant" and isinstance(thoughts, str)
        found.append(Form.REASONING if is_usual else Form.OTHER)
    given = {name for name, value in message.items() if value is not None and value != []}
    if not message.keys() - {"content"} <= given:
        found.append(Form.LEFT_OUT)
    has_no_call = role == "tool" and "tool_call_id" in message and "tool_call_id" not in given
    if role not in _ROLES or not given <= _OF_MESSAGES or has_no_call:
        found.append(Form.OTHER)
    return tuple(found)


def _are_usual_parts(parts: object) -> bool:
    """True if a message's parts all have a text, and nothing else. Some engines leave out an empty one,
    others join it; some give their template all fields."""
    return (
        isinstance(parts, list)
        and bool(parts)
        and all(isinstance(part, dict) and part.keys() == _OF_PARTS and part["text"] for part in parts)
    )


def _are_usual_calls(calls: Any, strings: JsonInStrings) -> bool:  # noqa: ANN401 - JSON
    """True if the calls of a message are usual, and their arguments are objects."""
    if not calls:
        return True
    return _are_like(calls, _OF_CALLS, _OF_CALLED) and all(
        _are_usual_arguments(call["function"]["arguments"], strings) for call in calls
    )


def _are_usual_arguments(text: object, strings: JsonInStrings) -> bool:
    """Some engines refuse arguments that are no object, others give their template an empty one."""
    if isinstance(text, str) and strings.is_too_much(text):
        return False
    try:
        arguments = msgspec.json.decode(text) if isinstance(text, str) else None
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(arguments, dict) and _is_usual_json(arguments)


def _are_like(items: object, names: Sequence[str], of_function: Sequence[str]) -> bool:
    """True if tools, or calls of tools, have exactly these fields in this order."""
    return isinstance(items, list) and all(
        isinstance(item, dict)
        and list(item) == names
        and isinstance(item["function"], dict)
        and list(item["function"]) == of_function
        for item in items
    )


def _is_usual_json(value: Any) -> bool:  # noqa: ANN401 - JSON
    """True if all engines write a value in the same way: not so fractions (1.0, 1e-7) and large integers."""
    if value is None:
        return True
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
