"""What a chat template refuses, or leaves out without a word, found by rendering marked chats once."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
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


Roles = tuple[str, ...]
_TURNS: Roles = ("user", "assistant", "user")
_SYSTEM: Roles = ("system", *_TURNS)
_SEVERAL: Roles = ("system", "system", *_TURNS)
_LATE: tuple[Roles, ...] = (("system", "user", "system"), ("system", "user", "assistant", "system", "user"))
_DEVELOPERS: tuple[Roles, ...] = (("developer", *_TURNS), ("system", "developer", *_TURNS))
PROBES: tuple[Roles, ...] = (_TURNS, _SYSTEM, _SEVERAL, *_LATE, *_DEVELOPERS)
"""Roles of the chats that are tried. If the first one is not kept, nothing can be told."""


def marked(roles: Roles, changed: int | None = None) -> list[dict[str, Any]]:
    """Messages of these roles, each with a text of its own; the one at `changed` has another one."""
    words = ["other" if at == changed else "mark" for at in range(len(roles))]
    return [
        {"role": role, "content": f"{word} {at} of {role}"}
        for at, (role, word) in enumerate(zip(roles, words, strict=True))
    ]


def lost_shapes(kept: AbstractSet[Roles]) -> frozenset[Shape]:
    """The shapes that are lost, by which of `PROBES` are `kept`: not refused, and all texts are in the
    prompt."""
    if _TURNS not in kept:
        return frozenset()
    if _SYSTEM not in kept:
        lost = {Shape.SYSTEM, Shape.SEVERAL_SYSTEMS, Shape.LATE_SYSTEM}
    else:
        lost = {Shape.SEVERAL_SYSTEMS} if _SEVERAL not in kept else set()
        lost |= {Shape.LATE_SYSTEM} if not kept >= {*_LATE} else set()
    return frozenset(lost if kept >= {*_DEVELOPERS} else {*lost, Shape.DEVELOPER})


def kept_by(render: Callable[[list[dict[str, Any]]], str]) -> set[Roles]:
    """The probes that a template keeps. `render` gives a prompt's text; it raises ChatError if it is
    refused."""
    return {roles for roles in PROBES if _keeps(render, marked(roles))}


def _keeps(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> bool:
    try:
        text = render(messages)
    except ChatError:
        return False
    return all(message["content"] in text for message in messages)
