"""What a chat template refuses, or leaves out without a word, found by trying marked chats once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Any

from engine_adapter.errors import ChatError

Messages = list[dict[str, Any]]


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
    TURNS = "turns that do not alternate"
    """An assistant's turn first, two turns of one role, or a user's turn right after a tool's result."""
    CALL = "tool call"
    """Its arguments."""
    LONE_RESULT = "tool result without its call"
    NULL_CONTENT = "null beside tool calls"
    """A call whose content is null: the template writes it as a word."""


Roles = tuple[str, ...]
_TURNS: Roles = ("user", "assistant", "user")
_SYSTEM: Roles = ("system", *_TURNS)
_SEVERAL: Roles = ("system", "system", *_TURNS)
_LATE: tuple[Roles, ...] = (("system", "user", "system"), ("system", "user", "assistant", "system", "user"))
_DEVELOPERS: tuple[Roles, ...] = (("developer", *_TURNS), ("system", "developer", *_TURNS))
_RESULT: Roles = ("user", "call", "tool")
_UNEVEN: tuple[Roles, ...] = (("assistant", "user"), ("user", "user"), (*_RESULT, "user"))
_ASKED: Roles = ("user", "asked", "tool")
_LONE: Roles = ("user", "tool")
_NULL: Roles = ("user", "null", "tool")
PROBES: tuple[Roles, ...] = (
    *(_TURNS, _SYSTEM, _SEVERAL, *_LATE, *_DEVELOPERS),
    *(_RESULT, *_UNEVEN, _ASKED, _LONE, _NULL),
)
"""Roles of the chats that are tried. `call` is an assistant that calls a tool, `asked` one whose arguments
are watched, `null` one without a text. If the first chat is not kept, nothing can be told."""
_WATCHED = ("system", "developer", "asked", "tool")
_ID = "call00001"


def trials(roles: Roles) -> Iterable[Messages]:
    """A chat of these roles, and others which differ from it in one text that must not be lost. It is kept if
    none of them is refused, and each of the others gives another prompt."""
    yield _chat(roles)
    if roles == _NULL:
        yield from (
            [*_chat(roles)[:1], _message("call", word), *_chat(roles)[2:]] for word in ("None", "null")
        )
        return
    watched = [at for at, role in enumerate(roles) if role in _WATCHED]
    watched = watched[:1] if roles == _ASKED else watched
    for at in watched or [0]:
        yield [*_chat(roles)[:at], _message(roles[at], "another"), *_chat(roles)[at + 1 :]]


def _chat(roles: Roles) -> Messages:
    return [_message(role, f"mark {at} of {role}") for at, role in enumerate(roles)]


def _message(role: str, text: str) -> dict[str, Any]:
    match role:
        case "call" | "null" | "asked":
            asks, said = {"call": ("{}", text), "null": ("{}", None), "asked": (f'{{"at": "{text}"}}', "")}[
                role
            ]
            call = {"id": _ID, "type": "function", "function": {"name": "mark", "arguments": asks}}
            return {"role": "assistant", "content": said, "tool_calls": [call]}
        case "tool":
            return {"role": "tool", "tool_call_id": _ID, "content": text}
        case _:
            return {"role": role, "content": text}


def lost_shapes(kept: AbstractSet[Roles]) -> frozenset[Shape]:
    """The shapes that are lost, by which of `PROBES` are `kept`."""
    if _TURNS not in kept:
        return frozenset()
    takes_system, takes_tools = _SYSTEM in kept, _RESULT in kept
    lost = {
        Shape.SYSTEM: not takes_system,
        Shape.SEVERAL_SYSTEMS: not takes_system or _SEVERAL not in kept,
        Shape.LATE_SYSTEM: not takes_system or not kept >= {*_LATE},
        Shape.DEVELOPER: not kept >= {*_DEVELOPERS},
        Shape.TURNS: not kept >= {*(_UNEVEN if takes_tools else _UNEVEN[:2])},
        Shape.CALL: not takes_tools or _ASKED not in kept,
        Shape.LONE_RESULT: not takes_tools or _LONE not in kept,
        Shape.NULL_CONTENT: takes_tools and _NULL not in kept,
    }
    return frozenset(shape for shape, is_lost in lost.items() if is_lost)


def kept_by(render: Callable[[Messages], str]) -> set[Roles]:
    """The probes that a template keeps. `render` gives a prompt's text; it raises ChatError if it is
    refused."""
    return {roles for roles in PROBES if _keeps(render, roles)}


def writes_system_first(render: Callable[..., str]) -> bool:
    """True if a template writes the system prompt before the tools. `render` as in `kept_by`; it takes
    `tools`, too."""
    tool = {"type": "function", "function": {"name": "marked_tool", "description": "", "parameters": {}}}
    messages = _chat(("system", "user"))
    try:
        text = render(messages, tools=[tool])
    except ChatError:
        return False
    return 0 <= text.find(messages[0]["content"]) < text.find("marked_tool")


def _keeps(render: Callable[[Messages], str], roles: Roles) -> bool:
    try:
        text, *others = map(render, trials(roles))
    except ChatError:
        return False
    return text not in others
