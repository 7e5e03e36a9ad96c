"""Tools as trtllm-serve gives them to its chat template: read into its models and written out again.

So every field of these models is there, in their order, with null where the client gave none: a template that
writes tools first would share almost nothing with one that got the client's JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_adapter.tensorrt_llm.fields import look_up

FUNCTION = ("name", "description", "parameters", "strict")
"""The fields of a function, for servers that do not list them. 1.2 and older have no `strict`."""


class GivenTools:
    """The client's tools → those of the template."""

    def __init__(self, openapi: object = None) -> None:
        """`openapi` is the server's description of its routes, if it gives one."""
        listed = look_up(openapi, "components", "schemas", "FunctionDefinition", "properties")
        self.fields: Sequence[str] = tuple(listed) if isinstance(listed, dict) and listed else FUNCTION

    def __call__(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A tool without a function stays: the server refuses it."""
        return [self._written(tool, tool.get("function")) for tool in tools]

    def _written(self, tool: dict[str, Any], function: object) -> dict[str, Any]:
        if not isinstance(function, dict):
            return tool
        written = {name: function.get(name) for name in self.fields}
        return {"type": tool.get("type", "function"), "function": written}
