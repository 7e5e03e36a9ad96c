"""What a chat template takes, found by reading it and by rendering trial chats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from enum import StrEnum
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes

from engine_adapter.errors import ChatError
from engine_adapter.prompt.template_input import ContentFormat
from engine_adapter.prompt.templates import environment

# --- finds out whether a chat template reads a message's content as text or as a list of parts ----------
# Templates do not declare it. Engines infer it: a template that loops over a message's content takes parts.
# The rules are those of vLLM's automatic detection, so that both render a list of parts in the same way.


@lru_cache(maxsize=64)
def content_format(template: str) -> ContentFormat:
    """The format of `template`; STRING for one that does not parse, as rendering it reports the error."""
    try:
        takes_parts = any(_content_loops(environment.parse(template)))
    except (TemplateError, RecursionError):
        return ContentFormat.STRING
    return ContentFormat.PARTS if takes_parts else ContentFormat.STRING


def looped(template: str) -> set[str]:
    """What a template's loops go over, as `name` or `name.key`; nothing of one that does not parse."""
    try:
        loops = [*environment.parse(template).find_all(nodes.For)]
        return {source for loop in loops if (source := _source(loop.iter))}
    except (TemplateError, RecursionError):
        return set()


def _content_loops(root: nodes.Template) -> Iterator[nodes.For]:
    """Loops over a message's content, directly, through the name `content`, or inside a macro."""
    messages, loops = _aliases(root, "messages"), [*root.find_all(nodes.For)]
    items = {_name(loop.target) for loop in loops if _source(loop.iter) in messages}
    contents = {f"{item}.content" for item in items if item}
    calls: dict[str | None, list[nodes.Call]] = {}  # by the name of what is called
    for call in root.find_all(nodes.Call):
        calls.setdefault(_name(call.node), []).append(call)
    in_macros: set[int] = set()
    for macro in root.find_all(nodes.Macro):
        bound = {name for call in calls.get(macro.name, ()) for name in _bound_by(call, macro, contents)}
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if _source(loop.iter) in bound:
                yield loop
    for loop in loops:
        source = _source(loop.iter)
        if source in contents or (source == "content" and id(loop) not in in_macros):
            yield loop


def _aliases(root: nodes.Template, name: str) -> set[str]:
    """`name`, and every variable assigned from it, directly or through others. One walk: templates of a
    hostile model may be long."""
    named: dict[str | None, list[str]] = {}  # what is assigned → the names it gets
    for each in root.find_all(nodes.Assign):
        if target := _name(each.target):
            named.setdefault(_source(each.node), []).append(target)
    found, waiting = set[str](), [name]
    while waiting:
        found.add(current := waiting.pop())
        waiting += named.pop(current, ())
    return found


def _bound_by(call: nodes.Call, macro: nodes.Macro, sources: AbstractSet[str]) -> Iterator[str]:
    """The parameters of `macro` that a call sets to one of `sources`."""
    given = [(param.name, arg) for param, arg in zip(macro.args, call.args, strict=False)]
    given += [(kwarg.key, kwarg.value) for kwarg in call.kwargs]
    return (name for name, arg in given if _source(arg) in sources)


def _name(node: nodes.Node) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _source(node: nodes.Node | None) -> str | None:
    """The `name` or `name.key` that an expression reads; filters, tests and slices are ignored."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name):
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
        return f"{node.node.name}.{key}" if isinstance(key, str) else None
    return None


# --- what a chat template refuses, or leaves out without a word, found by trying marked chats once ------

Messages = list[dict[str, Any]]


class MessageShape(StrEnum):
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


def lost_shapes(kept: AbstractSet[Roles]) -> frozenset[MessageShape]:
    """The shapes that are lost, by which of `PROBES` are `kept`."""
    if _TURNS not in kept:
        return frozenset()
    takes_system, takes_tools = _SYSTEM in kept, _RESULT in kept
    lost = {
        MessageShape.SYSTEM: not takes_system,
        MessageShape.SEVERAL_SYSTEMS: not takes_system or _SEVERAL not in kept,
        MessageShape.LATE_SYSTEM: not takes_system or not kept >= {*_LATE},
        MessageShape.DEVELOPER: not kept >= {*_DEVELOPERS},
        MessageShape.TURNS: not kept >= {*(_UNEVEN if takes_tools else _UNEVEN[:2])},
        MessageShape.CALL: not takes_tools or _ASKED not in kept,
        MessageShape.LONE_RESULT: not takes_tools or _LONE not in kept,
        MessageShape.NULL_CONTENT: takes_tools and _NULL not in kept,
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
