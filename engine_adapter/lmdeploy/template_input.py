"""Chats as LMDeploy gives them to the model's template: `serve/processors/multimodal.py` and
`serve/parsers/tool_parser/tool_parser.py` of 0.18.

Messages keep their fields. Every template gets a string, and functions without the tool around them.
"""

from __future__ import annotations

from typing import Any

from engine_adapter.prompt.template_input import ContentFormat, TemplateInput

# The fields of its model of a function, in their order.
_OF_FUNCTIONS = ("description", "name", "parameters")


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_function(tool.get("function")) for tool in tools]


def _function(function: Any) -> Any:  # noqa: ANN401 - JSON
    """A tool without a function stays one: the server refuses it."""
    return {name: function.get(name) for name in _OF_FUNCTIONS} if isinstance(function, dict) else function


def _message(message: dict[str, Any], _wanted: ContentFormat) -> dict[str, Any]:
    return message if message.get("content") is not None else message | {"content": ""}


LMDEPLOY_INPUT = TemplateInput(_tools, _message, content_format=lambda _: ContentFormat.STRING)
