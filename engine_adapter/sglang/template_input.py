"""Chats as SGLang gives them to the model's template: read into its models, and written out again.

So a tool has all fields of these models, and a call an index. These are the models of 0.5.23.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from engine_adapter.prompt.content_format import looped
from engine_adapter.prompt.template_input import ContentFormat, TemplateInput

# Templates with one of these words get parts, as do those that loop over one of these contents.
_OF_MEDIA = ("image", "audio", "video", "vision")
_CONTENTS = frozenset({"message.content", "msg.content", "m.content"})
# The fields of its models that a template gets, in their order. A function keeps the client's order.
_OF_FUNCTIONS = ("description", "name", "parameters")
_OF_USERS = ("role", "content")
_OF_MESSAGES = ("role", "content", "tool_call_id", "name", "phase", "reasoning_content", "tool_calls")
_JOINT = " "


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "type": tool.get("type", "function"),
            "function": _function(tool.get("function")),
            "defer_loading": tool.get("defer_loading"),
        }
        for tool in tools
    ]


def _function(function: Any) -> Any:  # noqa: ANN401 - JSON
    """A tool without a function stays: the server refuses it."""
    if not isinstance(function, dict):
        return function
    optional = ("strict", "defer_loading")
    known = {
        name: value
        for name, value in function.items()
        if name in _OF_FUNCTIONS or (name in optional and value is not None)
    }
    return known | {name: None for name in _OF_FUNCTIONS if name not in known}


def _message(message: dict[str, Any], _wanted: ContentFormat) -> dict[str, Any]:
    names = _OF_USERS if message["role"] == "user" else _OF_MESSAGES
    given: dict[str, Any] = {
        name: message.get(name) for name in names if name == "content" or message.get(name) is not None
    }
    content = given["content"]
    if message["role"] == "tool" and isinstance(content, list):
        content = _JOINT.join(part["text"] for part in content)
    given["content"] = "" if content is None else content
    if "tool_calls" in given:
        given["tool_calls"] = list(map(_call, given["tool_calls"]))
    return given


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {name: call["function"].get(name) for name in ("name", "arguments")}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": function}


@lru_cache(maxsize=64)
def _content_format(template: str) -> ContentFormat:
    has_media = any(word in template for word in _OF_MEDIA)
    return ContentFormat.PARTS if has_media or _CONTENTS & looped(template) else ContentFormat.STRING


SGLANG_INPUT = TemplateInput(_tools, _message, _JOINT, _content_format)
