"""A route of the admin API as data: what serves it, takes and answers. The OpenAPI document comes from it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from anyio.abc import TaskGroup
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from engine_adapter import UNREADABLE, plain_error
from engine_adapter.causes import Code
from engine_adapter.off_loop import off_loop
from proxy.control.kv import MAX_TTL_S
from proxy.control.operations import Name, Target
from proxy.errors import BadRequest, BodyTooLarge

Handler = Callable[[Request], Awaitable[Response]]
Operate = Callable[..., Awaitable[Any]]
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
    """A query parameter: a string, a boolean, or an integer from 1 to `most`."""

    name: str
    kind: str
    text: str
    default: int = 0
    most: int = 0

    @classmethod
    def number(cls, name: str, what: str, default: int, most: int) -> Query:
        """An integer. `what`: the beginning of its text."""
        return cls(name, "integer", f"{what}, 1 to {most}; {default} by default.", default, most)

    def of(self, request: Request) -> Any:  # noqa: ANN401 - by its kind
        """Its value in a request; raises BadRequest for an integer that is none."""
        text = request.query_params.get(self.name)
        if self.kind != "integer":
            return text == "true" if self.kind == "boolean" else text
        if text is None:
            return self.default
        is_short = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
        if not is_short or not 1 <= int(text) <= self.most:
            raise BadRequest(f"{self.name} must be an integer from 1 to {self.most}", param=self.name)
        return int(text)


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


def operation(method: str, path: str, **more: Any) -> Callable[[Operate], Endpoint]:  # noqa: ANN401 - fields of `Endpoint`
    """Makes an endpoint of a function, which defines it: its docstring is the summary; it gets parts of the
    path and of `query` by their names, the request as `request`, and the body as any other name; its result
    is the answer, a struct or None.

    `more`: further fields of `Endpoint`; of a function that returns a response, also `answer`.
    """

    def make(function: Operate) -> Endpoint:
        signature = inspect.signature(function, eval_str=True)
        queries = {each.name: each for each in more.get("query", ())}
        kinds = {
            name: each.annotation
            for name, each in signature.parameters.items()
            if name != "request" and name not in queries and f"{{{name}}}" not in path
        }

        async def handler(request: Request) -> Response:
            given: dict[str, Any] = {}
            for name in signature.parameters:
                if name == "request":
                    given[name] = request
                elif name in kinds:
                    given[name] = await read_body(request, kinds[name])
                else:
                    given[name] = queries[name].of(request) if name in queries else request.path_params[name]
            made = await function(**given)
            if made is None or isinstance(made, Response):
                return made or Response(status_code=endpoint.statuses[0])
            return answer(made, endpoint.statuses[0])

        usual = {
            "summary": " ".join((function.__doc__ or "").split()),
            "answer": signature.return_annotation,
            "body": next(iter(kinds.values()), None),
        }
        endpoint = Endpoint(method, path, handler, **usual | more)
        return endpoint

    return make


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
        message = str(error)
        name, path = _FIELD.search(message), _PATH.search(message)
        # The field as a path into the body.
        at_fault = ".".join(filter(None, (path and path["path"], name and name["name"])))
        if not at_fault:
            raise BadRequest("the body must be a JSON object", code=Code.INVALID_JSON) from error
        for pattern, words in PATTERNS.items():
            message = message.replace(f"Expected `str` matching regex {pattern!r}", f"must be {words}")
        raise BadRequest(plain_error(message), param=at_fault) from error
    except UNREADABLE as error:
        text = f"the body is not valid JSON: {plain_error(str(error))}"
        raise BadRequest(text, code=Code.INVALID_JSON) from error


def answer(content: msgspec.Struct, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


# --- the request bodies of the admin API. An unknown field is an error that names it --------------------

# A request for an operation is answered when the operation ends, or after this many seconds while it runs.
WAIT_S = 10.0
# Kvpins tell each other all keys in one message of at most 64 MiB.
MAX_KEY_MODELS = 100
Wait = Annotated[float, msgspec.Meta(ge=0, le=60)]
TENANT = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z"
_LINE = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
_MODEL = r"^(?=.*\S)[^\x00-\x1f\x7f-\x9f]*\Z"
# What a text must be, by its pattern: errors say this.
PATTERNS = {
    TENANT: "1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit",
    _LINE: "one line of text, without control characters",
    _MODEL: "one line of text that is not blank, without control characters",
}


class OnTarget(Target, kw_only=True):
    """A target, and how many seconds to wait for the operation's end."""

    wait_s: Wait = WAIT_S


class Flush(OnTarget):
    """The target to flush."""


class Offload(OnTarget):
    """The target to move from the GPU tier to host memory."""


class Restore(OnTarget, kw_only=True):
    """The target to move to the GPU tier.

    With `fallback`, engines that cannot restore compute a prefix again.
    """

    fallback: Literal["warm"] | None = None


class Warm(OnTarget, kw_only=True):
    """The prefix to compute. `engines: "all"` computes it on every ready engine of the model."""

    engines: Literal["all"] | None = None


class Pin(OnTarget, kw_only=True):
    """The prefix to keep, and for how many seconds."""

    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)] = 3600.0


class Unpin(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The pin to end."""

    pin_id: Name
    wait_s: Wait = WAIT_S


class Drain(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sends an engine no new requests; with `undo`, sends it requests again."""

    undo: bool = False


_Count = Annotated[int, msgspec.Meta(gt=0, lt=2**53)]


class AddKey(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The key to issue: its tenant, the models that it is for (all by default), and when it ends, as
    `2027-01-31T00:00:00Z`. `name` is for people. `new_tenant` allows a tenant that nobody knows. The limits
    are those of the tenant from now on; the settings must not name it."""

    tenant: Annotated[str, msgspec.Meta(pattern=TENANT)] | None = None
    name: Annotated[str, msgspec.Meta(max_length=64, pattern=_LINE)] = ""
    models: (
        Annotated[
            tuple[Annotated[str, msgspec.Meta(max_length=256, pattern=_MODEL)], ...],
            msgspec.Meta(min_length=1, max_length=MAX_KEY_MODELS),
        ]
        | None
    ) = None
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    new_tenant: bool = False
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrent_requests: _Count | None = None


class DryRun(msgspec.Struct, kw_only=True):
    """A request as a client would send it; `path` may name its route, and `tenant` its sender."""

    path: str | None = None
    tenant: str | None = None
    model: str | None = None


class PutTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A p-tuning table: base64 of safetensors bytes that hold one float tensor [rows, hidden]."""

    data: bytes
    id: Name | None = None
    extra_id: int | None = None
