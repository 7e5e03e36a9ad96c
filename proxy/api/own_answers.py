"""What kvpin answers itself on the data plane: errors, `/v1/models`, and the responses that it keeps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine_adapter import route_of
from engine_adapter.causes import Code
from engine_adapter.off_loop import off_loop
from proxy.errors import ANSWERED, BadRequest, MethodNotAllowed, NotFound, code_of, message_of, status_of
from proxy.fleet.destinations import refused_model
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.headers import REQUEST_ID_HEADER
from proxy.request.known_routes import response_in
from proxy.request.translate import ResponseStore
from proxy.request.translate.responses_store import StoredResponse
from proxy.request.translate.wording import NO_MORE, OPENAI, Dialect, error_body

# --- failed requests as Starlette responses, by their codes ---------------------------------------------

NOT_FOUND = 404
_CODES = {code.status: code for code in (Code.INVALID_VALUE, Code.NOT_FOUND, Code.METHOD_NOT_ALLOWED)}


def error_response(error: Exception, request_id: str | None = None, dialect: Dialect = OPENAI) -> Response:
    """The answer to a failed request. The text of a bug, which may hold anything, stays in the log."""
    code, message = code_of(error), message_of(error)
    if not isinstance(error, ANSWERED):
        message = "kvpin failed on this request; the log has the details"
    status = status_of(error)
    body = dialect.error(
        status,
        message,
        kind=getattr(error, "type", None) or code.type,
        param=getattr(error, "param", None),
        code=getattr(error, "engine_code", None) or code,
        request_id=request_id,
        more=getattr(error, "more", NO_MORE),
    )
    headers = dict(getattr(error, "headers", {}))
    if request_id:
        headers |= dict.fromkeys(dialect.id_headers, request_id)
    return Response(body, status, headers, media_type="application/json")


async def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for every class of `ANSWERED`."""
    return error_response(error, request.headers.get(REQUEST_ID_HEADER))


async def handle_http(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method), in the same shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path}: {getattr(error, 'detail', 'failed').lower()}"
    if status == NOT_FOUND:
        message = f"there is no route {request.method} {request.url.path}"
        if request.url.path.startswith("/admin"):
            message += "; /admin/v1/openapi.json lists the routes of the admin API"
        else:
            message += f"; OpenAI's API is under /v1: set base_url to {request.base_url}v1"
    body = error_body(message, kind="invalid_request_error", code=_CODES.get(status))
    return Response(body, status, getattr(error, "headers", None), media_type="application/json")


# --- `/v1/models`: the models that clients may name -----------------------------------------------------

READS, ALLOW_READS = ("GET", "HEAD"), "GET, HEAD, OPTIONS"
_MODELS = "/v1/models"


def is_of_models(path: str) -> bool:
    """True if kvpin itself answers requests for this path."""
    return path.startswith(_MODELS) and path[len(_MODELS) :][:1] in ("", "/", "?")


def name_in(path: str) -> str | None:
    """The model that a path names; None for the list of all. A llama-server's model may be named by its
    absolute path: slashes of the name stay."""
    return unquote(path.partition("?")[0].removeprefix(_MODELS).removeprefix("/").rstrip("/")) or None


def answer_models(
    fleet: Fleet,
    method: str,
    path: str,
    elsewhere: Collection[str] = (),
    models: frozenset[str] | None = None,
) -> Response:
    """The list of models, or one of them. An alias has the name it stands for as `root`, as in vLLM. So has a
    name that only engines which take any name serve. `elsewhere`: models of other kvpins, added to the list.
    `models`: the names that the client's key is for; None for all. No other is told of.

    Raises:
        MethodNotAllowed: it is no read.
        NotFound, NoEngine: nothing has that name.
        ModelRefused: the key is not for it.
    """
    asked = path.partition("?")[0]
    if method not in READS:
        raise MethodNotAllowed(f"{asked} takes {ALLOW_READS}, not {method}", allow=ALLOW_READS)
    cards = {name: _card(name, fleet.pools[model]) for name, model in fleet.served().items()}
    cards |= {alias: _alias(alias, cards[own]) for alias, own in fleet.served_aliases().items()}
    name = name_in(path)
    if name is None:
        listed = cards | {other: _plain_card(other) for other in sorted(elsewhere) if other not in cards}
        data = [card for each, card in listed.items() if models is None or each in models]
        return JSONResponse({"object": "list", "data": data})
    if models is not None and (name not in models or name not in cards):
        raise refused_model(name, models)
    if name not in cards:
        pool, _ = fleet.find(name)
        if not pool.any_model:
            raise fleet.not_served(name)
        return JSONResponse(_alias(name, cards[pool.model]))
    return JSONResponse(cards[name])


def _card(name: str, pool: Pool) -> dict[str, object]:
    """A model as clients see it, with its engines' own fields. A LoRA adapter has its model as `parent`, as
    in vLLM."""
    card = _plain_card(name)
    return {**pool.card, **card} if name == pool.model else {**card, "parent": pool.model}


def _plain_card(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvpin"}


def _alias(name: str, card: dict[str, object]) -> dict[str, object]:
    """The model of this card under another name."""
    return {**card, "id": name, "root": card["id"]}


# --- `/v1/responses/{id}`: reads and deletes the responses that kvpin keeps -----------------------------

_COMPACT = "/v1/responses/compact"
_MOST_ITEMS, _ITEMS = 100, 20
_ORDERS = ("asc", "desc")
# Items that are listed or deleted in about 1 ms.
_ITEMS_PER_MS = 1024


@dataclass(frozen=True, slots=True)
class KeptResponses:
    """The routes of responses that kvpin keeps itself, because their engines got chats."""

    store: ResponseStore

    def keeps(self, tenant: str | None, response_id: str) -> bool:
        """True if a tenant's response is kept."""
        return self.store.of(tenant).get(response_id) is not None

    async def answer(self, method: str, target: str, tenant: str | None) -> Response | None:
        """The answer to a request for one of the tenant's responses; None if it names none of them. Raises
        BadRequest: a parameter is wrong, or the response cannot be cancelled; NotFound: there is no such
        route."""
        path, _, query = target.partition("?")
        if (route := route_of(path)) == _COMPACT:
            raise NotFound("conversations are not compacted here: send a shorter input")
        if (response_id := response_in(route)) is None:
            return None
        shelf = self.store.of(tenant)
        if (stored := shelf.get(response_id)) is None:
            return None
        part = "/".join(route.split("/")[4:])
        long = stored.turn.n_items / _ITEMS_PER_MS
        match method, part:
            case "GET", "":
                if parse_qs(query).get("stream") == ["true"]:
                    raise BadRequest("a response is streamed while it is made, and not again", param="stream")
                content = stored.content
            case "DELETE", "":
                await off_loop(lambda: shelf.delete(response_id), ms=long)
                content = msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})
            case "POST", "cancel":
                raise BadRequest("Only responses that are made in the background can be cancelled.")
            case "GET", "input_items":
                content = await off_loop(lambda: _listed(stored, parse_qs(query)), ms=long)
            case _:
                raise NotFound(f"there is no route {method} {path!r}")
        return Response(content, media_type="application/json")


def _listed(stored: StoredResponse, query: dict[str, list[str]]) -> bytes:
    """A page of the items that were the input of a response, the turns before it included."""
    items: dict[str, bytes] = {}
    for part in stored.turn.input():
        items.update(part)  # ten times as fast as from single items
    names = list(items)
    order, limit, after = query.get("order", ["desc"])[-1], _limit(query), query.get("after", [""])[-1]
    if order not in _ORDERS:
        raise BadRequest("order must be asc or desc", param="order")
    if order == "desc":
        names.reverse()
    if after:
        if after not in items:
            raise BadRequest(
                f"after must be the id of an item of this response; {after!r} is none", param="after"
            )
        names = names[names.index(after) + 1 :]
    page = names[:limit]
    ends: dict[str, Any] = {"first_id": page[0] if page else None, "last_id": page[-1] if page else None}
    data = [msgspec.Raw(items[name]) for name in page]
    return msgspec.json.encode({"object": "list", "data": data, **ends, "has_more": len(names) > len(page)})


def _limit(query: dict[str, list[str]]) -> int:
    given = query.get("limit", [str(_ITEMS)])[-1]
    is_short = len(given) <= len(str(_MOST_ITEMS))  # Python refuses to read thousands of digits
    if not (given.isdecimal() and is_short) or not 1 <= int(given) <= _MOST_ITEMS:
        raise BadRequest(f"limit must be a number from 1 to {_MOST_ITEMS}", param="limit")
    return int(given)
