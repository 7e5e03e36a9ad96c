"""Errors about a chat, in the words of the request that the chat was made of.

The client never saw the chat: its positions (`messages[1]`, where the system prompt is the first message) and
its names (`image_url`, `response_format`) mean nothing to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

# `messages[1].content[0].type`, and the like of `tools`.
_POSITION = re.compile(r"(?<![\w.])(messages|tools)\[(\d+)\]((?:\.\w+|\[\d+\])*)")
_PART = re.compile(r"\.content\[(\d+)\](.*)")
_QUOTED = re.compile(r"'(\w+)'")


class Place(NamedTuple):
    """The place in a request that a message of its chat was made of.

    Attributes:
        at: the message or item.
        content: its content.
        parts: the places of the parts of the chat's message; empty if that has a text.
    """

    at: str
    content: str
    parts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Names:
    """The names of an API for what chats name otherwise.

    Attributes:
        fields: top-level fields of a chat → theirs.
        within: what follows the place of a part or a tool → theirs; the first that fits counts.
        types: types of parts → theirs.
    """

    fields: Mapping[str, str]
    within: Mapping[str, str]
    types: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Wording:
    """The words of one request.

    Attributes:
        names: those of its API.
        places: of each message of the chat.
        tools: the number in the request of each tool of the chat; None if they are the same.
    """

    names: Names
    places: Sequence[Place] = ()
    tools: Sequence[int] | None = None

    def path(self, of_chat: str) -> str:
        """The client's name of a field of the chat."""
        if (found := _POSITION.match(of_chat)) is not None:
            return self._place(found)
        return self.names.fields.get(re.split(r"\W", of_chat, maxsplit=1)[0], of_chat)

    def text(self, of_chat: str) -> str:
        """A sentence about the chat, in the client's words. Names that are English words, too, stay."""
        text, found = _POSITION.subn(self._place, of_chat)
        for name, own in self.names.fields.items():
            if "_" in name:
                text = re.sub(rf"(?<![\w.]){name}(?!\w)", own, text)
        if found or text != of_chat:
            text = _QUOTED.sub(lambda quoted: f"'{self.names.types.get(quoted[1], quoted[1])}'", text)
        return text

    @contextmanager
    def errors(self, *classes: type[Exception]) -> Iterator[None]:
        """Errors of these classes, raised inside the block, speak of the client's request."""
        try:
            yield
        except classes as error:
            self.reword(error)
            raise

    def reword(self, error: Exception) -> None:
        """Lets an error speak of the client's request."""
        if error.args and isinstance(error.args[0], str):
            error.args = (self.text(error.args[0]), *error.args[1:])
        param = getattr(error, "param", None)
        if isinstance(param, str):
            error.param = self.path(param)  # type: ignore[attr-defined]  # it has one

    def _place(self, found: re.Match[str]) -> str:
        """The client's place of a message, a part or a tool."""
        kind, index, rest = found[1], int(found[2]), found[3]
        if kind == "tools":
            at = index if self.tools is None else self.tools[index] if index < len(self.tools) else None
            return "tools" if at is None else f"tools[{at}]{self._within(rest)}"
        if index >= len(self.places):
            return self.names.fields.get(kind, kind)
        place = self.places[index]
        if (part := _PART.fullmatch(rest)) is not None and int(part[1]) < len(place.parts):
            return f"{place.parts[int(part[1])]}{self._within(part[2])}"
        if rest.startswith(".content"):
            return place.content
        return f"{place.at}{rest if rest == '.role' else ''}"

    def _within(self, rest: str) -> str:
        """What follows a place, in the client's names."""
        for theirs, own in self.names.within.items():
            if rest == theirs or rest.startswith((f"{theirs}.", f"{theirs}[")):
                return f"{own}{rest.removeprefix(theirs)}"
        return rest
