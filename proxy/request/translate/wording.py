"""Errors about a chat, in the words of the request that the chat was made of.

The client never saw the chat: its positions (`messages[1]`, where the system prompt is the first message) and
its names (`image_url`, `response_format`) mean nothing to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from engine_adapter.causes import Code
from proxy.headers import ANTHROPICS_ID_HEADER, REQUEST_ID_HEADER

# --- the dialect of each API for errors and request ids: OpenAI's, and Anthropic's on `/v1/messages` ----
# The route that the client asked decides, even if an engine serves the request on another route.

NO_MORE: Mapping[str, object] = MappingProxyType({})
# The second: Anthropic's clients add /v1 to their base URL.
_MESSAGES = (b"/v1/messages", b"/v1/v1/messages")
_ANTHROPIC_TYPES = {
    401: "authentication_error", 402: "billing_error", 403: "permission_error", 404: "not_found_error",
    409: "conflict_error", 413: "request_too_large", 424: "api_error", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def error_body(
    message: str,
    *,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    more: Mapping[str, object] = NO_MORE,
) -> bytes:
    """An error in OpenAI's shape. `more` fields may replace these."""
    error = {"message": message, "type": kind, "param": param, "code": code, **more}
    return msgspec.json.encode({"error": error})


# kvpin's own error, and vLLM's: the limit, then the prompt's tokens.
_CONTEXT = re.compile(
    r"context (?:is|length is) (\d+) tokens[;.] .*?(?:prompt has (?:at least )?|requested )(\d+)"
)


class Dialect(NamedTuple):
    """One API's way.

    Attributes:
        id_headers: the headers of an answer that name its request.
        event: the beginning of an event of a stream that holds an error.
        is_anthropics: the status alone decides an error's type, as it decides the SDK's class of error.
    """

    id_headers: tuple[str, ...]
    event: bytes
    is_anthropics: bool

    def error(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        request_id: str | None = None,
        more: Mapping[str, object] = NO_MORE,
    ) -> bytes:
        """The body of an error. `kind`, `param`, `code` and `more` fields are OpenAI's, or an engine's."""
        if not self.is_anthropics:
            return error_body(message, kind=kind, param=param, code=code, more=more)
        other = "invalid_request_error" if status < 500 else "api_error"  # noqa: PLR2004 - HTTP
        if code == Code.CONTEXT_LENGTH_EXCEEDED:  # with Anthropic's words, agents shorten their chats
            numbers = _CONTEXT.search(message)
            said = f"{numbers[2]} tokens > {numbers[1]} maximum" if numbers is not None else message
            message = f"prompt is too long: {said}"
        error = {"type": _ANTHROPIC_TYPES.get(status, other), "message": message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def error_event(self, error: bytes) -> bytes:
        """An event of a stream that holds an error."""
        return b"%bdata: %b\n\n" % (self.event, error)


OPENAI = Dialect((REQUEST_ID_HEADER,), b"", is_anthropics=False)
"""The way of every route but Anthropic's."""
ANTHROPIC = Dialect((REQUEST_ID_HEADER, ANTHROPICS_ID_HEADER), b"event: error\n", is_anthropics=True)


def dialect_of(target: bytes) -> Dialect:
    """The dialect of a route, from a path as clients send it."""
    return ANTHROPIC if target.startswith(_MESSAGES) else OPENAI


# --- wording --------------------------------------------------------------------------------------------

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
