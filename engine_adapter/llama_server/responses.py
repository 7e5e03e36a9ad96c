"""Turns a `/v1/responses` request into the chat that llama-server renders with its template.

The assistant's items of one turn (reasoning, text, calls) become one message. Tools other than functions are
left out, and so are fields that do not reach the prompt.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected

_BAD_REQUEST = 400
_ASKED, _SAID = frozenset({"input_text"}), frozenset({"output_text", "input_text"})


def as_chat(body: JsonBody) -> JsonBody:
    """The chat request with the same prompt. Fields that are not part of the conversation stay as they are.

    Raises:
        EngineRejected: the server refuses it, or token ids do not identify it (images, files, stored ones).
        UnreadableField: a field this reads is not valid JSON.
    """
    if body.get("previous_response_id"):
        raise _rejected(
            "previous_response_id names a response that is not stored here", "previous_response_id"
        )
    changes: dict[str, Any] = {
        "input": None,
        "instructions": None,
        "reasoning": None,
        "messages": [*_instructions(body), *_conversation(body.get("input"))],
    }
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and "effort" in reasoning:
        changes["reasoning_effort"] = reasoning["effort"]
    if "tools" in body:
        changes["tools"] = _functions(body.get("tools")) or None
    return body.replace(**changes)


def _instructions(body: JsonBody) -> list[dict[str, Any]]:
    """The system message, which comes first. Null instructions count as empty ones."""
    if "instructions" not in body:
        return []
    text = body.get("instructions")
    if not isinstance(text, str | None):
        raise _rejected("instructions must be a text", "instructions")
    return [{"role": "system", "content": text or ""}]


def _conversation(given: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise _rejected("input must be a text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, param: str) -> None:  # noqa: ANN401 - JSON
    """Adds an item to the last message if both are the assistant's, otherwise as a new message."""
    match item:
        case {"role": "user" | "system" | "developer", "content": str() | list() as content}:
            asked = _texts(content, _ASKED, f"{param}.content")
            messages.append({**_without(item, "type", "status"), "content": asked})
        case {"type": "message", "role": "assistant", "content": str() | list() as content}:
            said = _texts(content, _SAID, f"{param}.content")
            turn = _turn(messages, _without(item, "type", "status", "content"))
            turn["content"] = [*_list(turn, "content"), *said]
        case {"type": "function_call", "call_id": str(call_id), "name": str(), "arguments": str()}:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": call_id, "type": "function", "function": function}
            turn = _turn(messages, {"role": "assistant"})
            turn["tool_calls"] = [*_list(turn, "tool_calls"), call]
        case {"type": "function_call_output", "call_id": str(call_id), "output": str() | list() as output}:
            text = output if isinstance(output, str) else _texts(output, _ASKED, f"{param}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        case {"type": "reasoning", "summary": list(), "content": [{"text": str(thought)}, *_]}:
            _turn(messages, {"role": "assistant", "content": []})["reasoning_content"] = thought
        case _:
            raise _rejected(f"{param} is no item that becomes a message", param)


def _turn(messages: list[dict[str, Any]], new: dict[str, Any]) -> dict[str, Any]:
    """The last message if it is the assistant's, otherwise `new`, which is added."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append(new)
    return messages[-1]


def _list(message: dict[str, Any], name: str) -> list[Any]:
    """The list of that name, an empty one without it."""
    value = message.get(name)
    return value if isinstance(value, list) else []


def _texts(content: str | list[Any], kinds: Container[str], param: str) -> list[dict[str, str]]:
    """Text parts of a chat, from the parts of an item."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    texts = []
    for index, part in enumerate(content):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in kinds:
                texts.append({"type": "text", "text": text})
            case _:
                raise _rejected(f"{param}[{index}] is no text", f"{param}[{index}]")
    return texts


def _functions(tools: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _rejected("tools must be a list of objects", "tools")
    return [
        {"type": "function", "function": {**_without(tool, "type"), "strict": tool.get("strict", True)}}
        for tool in tools
        if tool.get("type") == "function"
    ]


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _rejected(reason: str, param: str) -> EngineRejected:
    return EngineRejected(f"{reason}: it is not followed", status=_BAD_REQUEST, param=param)
