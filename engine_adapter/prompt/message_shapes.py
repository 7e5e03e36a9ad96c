"""What a chat template refuses, or leaves out without a word, found by rendering marked chats once."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from engine_adapter.errors import ChatError


class Shape(StrEnum):
    """Messages that some templates do not take."""

    SYSTEM = "system message"
    """Any system message."""
    SEVERAL_SYSTEMS = "several system messages"
    """More than one before the first turn."""
    LATE_SYSTEM = "late system message"
    """One after the first turn."""
    DEVELOPER = "developer message"
    """One where a system message may be."""


Render = Callable[[list[dict[str, Any]]], str]
"""Messages → the prompt's text; raises ChatError if they are refused."""
_TURNS = ("user", "assistant", "user")


def lost_shapes(render: Render) -> frozenset[Shape]:
    """The shapes of which a text is missing in the prompt, or that are refused. None are told of a template
    that does not even keep a chat of two turns."""
    if not _keeps(render, *_TURNS):
        return frozenset()
    lost = set[Shape]()
    system = _keeps(render, "system", *_TURNS)
    if not system:
        lost |= {Shape.SYSTEM, Shape.SEVERAL_SYSTEMS, Shape.LATE_SYSTEM}
    if not (_keeps(render, "developer", *_TURNS) and _keeps(render, "system", "developer", *_TURNS)):
        lost.add(Shape.DEVELOPER)
    if system and not _keeps(render, "system", "system", *_TURNS):
        lost.add(Shape.SEVERAL_SYSTEMS)
    late = (("system", "user", "system"), ("system", "user", "assistant", "system", "user"))
    if system and not all(_keeps(render, *roles) for roles in late):
        lost.add(Shape.LATE_SYSTEM)
    return frozenset(lost)


def _keeps(render: Render, *roles: str) -> bool:
    """True if the texts of such messages are in the prompt."""
    messages = [{"role": role, "content": f"mark {at} of {role}"} for at, role in enumerate(roles)]
    try:
        text = render(messages)
    except ChatError:
        return False
    return all(message["content"] in text for message in messages)
