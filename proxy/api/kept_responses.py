"""`/v1/responses/{id}`: reads and deletes the responses that kvpin keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response

from engine_adapter import route_of
from engine_adapter.off_loop import off_loop
from proxy.errors import BadRequest, NotFound
from proxy.request.stored import response_in
from proxy.request.translate import ResponseStore
from proxy.request.translate.responses_store import StoredResponse

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
        """The answer to a request for one of the tenant's responses; None if it names none of them.

        Raises:
            BadRequest: a parameter is wrong, or the response cannot be cancelled.
            NotFound: there is no such route.
        """
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
                gone = {"id": response_id, "object": "response", "deleted": True}
                content = msgspec.json.encode(gone)
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
