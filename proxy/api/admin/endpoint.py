"""A route of the admin API as data: what serves it, takes and answers. The OpenAPI document comes from it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from anyio.abc import TaskGroup
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from engine_adapter import UNREADABLE, plain_error
from engine_adapter.causes import Code
from engine_adapter.off_loop import off_loop
from proxy.api.admin.request_bodies import PATTERNS
from proxy.errors import BadRequest, BodyTooLarge

Handler = Callable[[Request], Awaitable[Response]]
Body = TypeVar("Body")

# The longest request body: prompt tables are the largest.
MAX_BODY_BYTES = 512 * 2**20
# Bytes that are joined in about 1 ms.
_JOINED_PER_MS = 4 * 2**20
# Digits of the longest number in a query: Python refuses thousands of them by a ValueError.
_MOST_DIGITS = 12
_FIELD = re.compile(r"field `(?P<name>[^`]+)`")
_PATH = re.compile(r"at `\$\.?(?P<path>[^`]*)`")


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter of type integer or string."""

    name: str
    kind: str
    text: str


Join = Callable[[Request, list[dict[str, Any]]], dict[str, Any]]
"""Makes one answer of those of all workers, this one's first."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    Attributes:
        method: e.g. `POST`.
        path: the path below `/admin/v1`; `{name}` is a path parameter.
        handler: serves it.
        summary: one sentence for the document.
        answer: struct of a good answer; None for an empty one.
        body: struct of the request body, or the settings it is checked by; None without a body.
        open_body: fields beside those of `body` are allowed.
        raw_body: bytes are taken as well.
        statuses: statuses of the answers that have this struct.
        is_stream: the answer is a stream of server-sent events. Each has the name of a field of `answer` and
            its value as data.
        query: query parameters.
        others: the other kvpins of the machine `do` it, too; one of them may `know` what is named if this one
            does not; or it is an order about engines, which other workers `follow` before it is answered.
        join: where each worker has a part of the answer: makes one of all.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct | BaseModel] | None = None
    open_body: bool = False
    raw_body: bool = False
    statuses: tuple[int, ...] = (200,)
    is_stream: bool = False
    query: tuple[Query, ...] = field(default=())
    others: Literal["do", "know", "follow"] | None = None
    join: Join | None = None

    def check_query(self, request: Request) -> None:
        """Raises BadRequest for a query parameter that the route does not have: a misspelt filter would
        filter nothing."""
        taken = [query.name for query in self.query]
        for name in request.query_params:
            if name not in taken:
                known = f"only {', '.join(taken)}" if taken else "none"
                raise BadRequest(
                    f"there is no query parameter {name!r}; this route takes {known}", param=name
                )


async def read_bytes(request: Request, most: int | None = None) -> bytes:
    """The request's body. Raises BodyTooLarge beyond `most` or MAX_BODY_BYTES, BadRequest when its client
    left."""
    most = most or MAX_BODY_BYTES
    chunks, size = [], 0
    try:
        async with aclosing(request.stream()) as stream:
            async for chunk in stream:
                size += len(chunk)
                if size > most:
                    raise BodyTooLarge(f"the body is longer than the limit of {most} bytes")
                chunks.append(chunk)
    except ClientDisconnect as error:
        raise BadRequest("the body ended early") from error
    return await off_loop(partial(b"".join, chunks), ms=size / _JOINED_PER_MS)


async def until_left(receive: Receive, group: TaskGroup) -> None:
    """Ends the group when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    group.cancel_scope.cancel()


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The JSON body as `kind`; an empty one is `{}`. Raises BadRequest naming the field, BodyTooLarge."""
    return decode(await read_bytes(request) or b"{}", kind)


def decode(raw: bytes, kind: type[Body]) -> Body:
    """JSON → `kind`; raises BadRequest naming the field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        at_fault = _field_of(str(error))
        if at_fault is None:
            raise BadRequest("the body must be a JSON object", code=Code.INVALID_JSON) from error
        raise BadRequest(_in_words(str(error)), param=at_fault) from error
    except UNREADABLE as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code=Code.INVALID_JSON) from error


def answer(content: msgspec.Struct, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def int_query(request: Request, name: str, default: int, most: int) -> int:
    """An integer from 1 to `most` out of the query string; raises BadRequest."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS) or not 1 <= int(text) <= most:
        raise BadRequest(f"{name} must be an integer from 1 to {most}", param=name)
    return int(text)


def _in_words(message: str) -> str:
    """The message of a `msgspec.ValidationError`, with what a text must be in place of its pattern."""
    for pattern, words in PATTERNS.items():
        message = message.replace(f"Expected `str` matching regex {pattern!r}", f"must be {words}")
    return plain_error(message)


def _field_of(message: str) -> str | None:
    """The field that a message of msgspec is about, as a path into the body."""
    name, path = _FIELD.search(message), _PATH.search(message)
    parts = [path["path"] if path else "", name["name"] if name else ""]
    return ".".join(part for part in parts if part) or None
