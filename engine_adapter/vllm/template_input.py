"""Chats as vLLM gives them to the model's template: `renderers/chat_utils.py` of 0.32.

Messages keep only the fields that vLLM knows. A template that takes parts gets them for every content. What
older versions do otherwise, the probes of proxy/prompt/exactness.py show.
"""

from __future__ import annotations

from typing import Any

from engine_adapter.body import BILLING
from engine_adapter.prompt.template_input import ContentFormat, TemplateInput, is_text

_REASONING = ("reasoning", "reasoning_content")


def _message(message: dict[str, Any], wanted: ContentFormat) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if wanted is ContentFormat.STRING and role != "system" and is_text(message):
        return {"role": role, "content": content}
    parts = (
        content
        if isinstance(content, list)
        else []
        if content is None
        else [{"type": "text", "text": content}]
    )
    if role == "system":
        parts = [part for part in map(_without_billing, parts) if part is not None]
    takes_parts = wanted is ContentFormat.PARTS and role != "tool"
    given: dict[str, Any] = {
        "role": role,
        "content": parts if takes_parts else "\n".join(part["text"] for part in parts),
    }
    if role == "assistant":
        if message.get("tool_calls"):
            given["tool_calls"] = list(map(_call, message["tool_calls"]))
        thoughts = message.get("reasoning")
        thoughts = message.get("reasoning_content") if thoughts is None else thoughts
        if thoughts is not None:
            given |= dict.fromkeys(_REASONING, thoughts)
    elif role == "tool" and "tool_call_id" in message:
        given["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        given["name"] = message["name"]
    return given


def _without_billing(part: dict[str, Any]) -> dict[str, Any] | None:
    """The part without the line of Claude Code that begins it; None if nothing is left."""
    if not part["text"].startswith(BILLING):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Its fields in the order of vLLM's models. Arguments that are no object count as none."""
    function = call["function"]
    arguments = function.get("arguments")
    arguments = arguments if isinstance(arguments, dict) else {}
    return _first(
        call | {"function": _first(function | {"arguments": arguments}, "arguments", "name")},
        "id",
        "function",
    )


def _first(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """The fields, these ones first."""
    return {name: fields[name] for name in names if name in fields} | fields


VLLM_INPUT = TemplateInput(message=_message)
