"""A route as data: what serves it, what it takes and gives. The OpenAPI document is made from the same."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from proxy.control import Control
from proxy.errors import BadRequest, BodyTooLarge

Handler = Callable[[Control, Request], Awaitable[Response]]
_Body = TypeVar("_Body", bound=msgspec.Struct)

_FIELD = re.compile(r"field `(?P<name>[^`]+)`")
_PATH = re.compile(r"at `\$\.?(?P<path>[^`]*)`")


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter of type integer or string."""

    name: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    Attributes:
        method, path: below `/admin/v1`; `{name}` is a path parameter.
        handler: serves it.
        summary: one sentence for the document.
        answer: struct of a good answer; None for an empty one.
        body: struct of the request body, where there is one.
        open_body: other fields may stand beside those of `body`.
        raw_body: bytes are taken as well.
        statuses: statuses of good answers.
        query: query parameters.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    open_body: bool = False
    raw_body: bool = False
    statuses: tuple[int, ...] = (200,)
    query: tuple[Query, ...] = field(default=())


async def read_bytes(request: Request, limit: int) -> bytes:
    """The request's body. Raises BodyTooLarge beyond `limit` bytes, BadRequest when its client left."""
    chunks, size = [], 0
    try:
        async with aclosing(request.stream()) as stream:
            async for chunk in stream:
                size += len(chunk)
                if size > limit:
                    raise BodyTooLarge(f"the body is longer than the limit of {limit} bytes")
                chunks.append(chunk)
    except ClientDisconnect as error:
        raise BadRequest("the body ended early") from error
    return b"".join(chunks)


async def read_body(request: Request, limit: int, kind: type[_Body]) -> _Body:
    """The JSON body as `kind`; an empty one is `{}`. Raises BadRequest naming the field, BodyTooLarge."""
    return decode(await read_bytes(request, limit) or b"{}", kind)


def decode(raw: bytes, kind: type[_Body]) -> _Body:
    """JSON → struct; raises BadRequest naming the field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        at_fault = _field_of(str(error))
        if at_fault is None:
            raise BadRequest("the body must be a JSON object", code="invalid_json") from error
        raise BadRequest(str(error), param=at_fault) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error


def answer(kind: type[msgspec.Struct], values: Any, status: int = 200) -> Response:  # noqa: ANN401 - JSON
    """A JSON answer, held to its struct."""
    return Response(
        msgspec.json.encode(msgspec.convert(values, kind)),
        status,
        media_type="application/json",
    )


def int_query(request: Request, name: str, default: int, most: int) -> int:
    """An integer from 1 to `most` out of the query string; raises BadRequest."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:12]) <= most:
        raise BadRequest(f"{name} must be an integer from 1 to {most}", param=name)
    return int(text)


def _field_of(message: str) -> str | None:
    """The field a message of msgspec is about, as a path into the body."""
    name, path = _FIELD.search(message), _PATH.search(message)
    parts = [path["path"] if path else "", name["name"] if name else ""]
    return ".".join(part for part in parts if part) or None
