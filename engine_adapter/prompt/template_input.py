"""How an engine gives a chat to the model's template.

Most do it alike; an adapter declares what its engine does otherwise in `EngineInfo.template_input`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ContentFormat(StrEnum):
    """The form of `message.content` that a template takes when the client sent a list of parts."""

    STRING = "string"
    PARTS = "parts"


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a template gets of a chat.

    Attributes:
        tools: the client's tools → the template's; None: as they are.
        message: a message in the form that templates expect, and the form in which this template gets text
            parts → the template's message; None: as it is.
        joint: what joins the text parts of a message for a template that takes a string.
        content_format: template → the form in which it gets text parts; None: see template_trials.py.
        ascii_space: white space beyond ASCII, such as U+3000, is none for a template's `strip` and `trim`.
    """

    tools: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    message: Callable[[dict[str, Any], ContentFormat], dict[str, Any]] | None = None
    joint: str = "\n"
    content_format: Callable[[str], ContentFormat] | None = None
    ascii_space: bool = False


def is_text(message: Mapping[str, Any]) -> bool:
    """True if a message is a text that someone says, and no more."""
    return len(message) == 2 and type(message.get("content")) is type(message.get("role")) is str  # noqa: PLR2004


def _usual_message(message: dict[str, Any], _wanted: ContentFormat) -> dict[str, Any]:
    """The message without a list of no calls: to many templates, a message that has one makes calls."""
    if message.get("tool_calls") != []:
        return message
    return {name: value for name, value in message.items() if name != "tool_calls"}


USUAL = TemplateInput(message=_usual_message)
"""As kvpin's own engine does it."""
