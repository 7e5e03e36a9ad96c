"""Keys of clients that kvpin issues."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from proxy.api.admin.endpoint import AddKey, Endpoint, PutTable, Query, answer, decode, read_body, read_bytes
from proxy.control.keys import (
    IssuedKeys,
    KeyAnswer,
    NewKey,
    RemovedKey,
    SharedTables,
    TableAnswer,
    notes_of,
    used_engines,
)
from proxy.core.quotas import TenantLimits
from proxy.errors import BadRequest
from proxy.fleet.fleet import Fleet
from proxy.request.tenants import Tenants


class KeyList(msgspec.Struct):
    """The issued keys; those of the settings are not among them.

    `needed`: requests need a key. `in_settings`: how many keys the settings have.
    """

    keys: list[KeyAnswer]
    needed: bool
    in_settings: int


def key_routes(keys: IssuedKeys, tenants: Tenants, fleet: Fleet) -> tuple[Endpoint, ...]:
    """Issues, lists and removes keys."""

    async def list_keys(_request: Request) -> Response:
        return answer(
            KeyList(keys.described(), needed=not tenants.open, in_settings=tenants.count_in_settings)
        )

    async def post_key(request: Request) -> Response:
        body = await read_body(request, AddKey)
        was_open, used = tenants.open, used_engines(fleet)
        key = await keys.add(
            tenant=body.tenant,
            name=body.name,
            models=body.models,
            expires=body.expires,
            limits=TenantLimits(body.requests_per_minute, body.tokens_per_minute, body.concurrent_requests),
            new_tenant=body.new_tenant,
        )
        key.notes = [*notes_of(key, tenants, fleet, was_open=was_open, used=used)]
        added = answer(key, 201)
        added.headers["cache-control"] = "no-store"
        return added

    async def delete_key(request: Request) -> Response:
        return answer(await keys.remove(request.path_params["key_id"]))

    return (
        Endpoint(
            "GET", "/keys", list_keys, "The keys that this API issued, without the keys themselves.", KeyList
        ),
        Endpoint(
            "POST",
            "/keys",
            post_key,
            "Issues a key for a tenant and tells it once; 409 without `state_dir`.",
            NewKey,
            body=AddKey,
            statuses=(201,),
        ),
        Endpoint(
            "DELETE",
            "/keys/{key_id}",
            delete_key,
            "Removes an issued key, even if that cannot be saved; its requests in flight go on to their end.",
            RemovedKey,
            others="do",  # they read it in the file of keys, unless that cannot be written
        ),
    )


RAW = ("application/octet-stream", "application/x-safetensors")


class TableList(msgspec.Struct):
    """All tables."""

    prompt_tables: list[TableAnswer]


def table_routes(tables: SharedTables) -> tuple[Endpoint, ...]:
    """Registers, lists and forgets prompt tables."""

    async def list_tables(_request: Request) -> Response:
        return answer(TableList(tables.described()))

    async def post_table(request: Request) -> Response:
        raw = await read_bytes(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in RAW:
            extra_id = _extra_id(request.query_params.get("extra_id"))
            body = PutTable(data=raw, id=request.query_params.get("id"), extra_id=extra_id)
        else:
            read = partial(decode, raw, PutTable)
            body = await off_loop(read, ms=len(raw) / JSON_BYTES_PER_MS)
        return answer(await tables.put(body.data, table_id=body.id, extra_id=body.extra_id))

    async def delete_table(request: Request) -> Response:
        await tables.delete(request.path_params["table_id"])
        return Response(status_code=204)

    ids = (
        Query("id", "string", "With a raw body: the table's name; by default from its content."),
        Query(
            "extra_id",
            "integer",
            "With a raw body: its identity; by default it is derived from the content.",
        ),
    )
    return (
        Endpoint("GET", "/prompt_tables", list_tables, "All registered p-tuning tables.", TableList),
        Endpoint(
            "POST",
            "/prompt_tables",
            post_table,
            "Registers a table here and on every engine that holds tables, or nowhere.",
            TableAnswer,
            body=PutTable,
            raw_body=True,
            query=ids,
            others="do",
        ),
        Endpoint(
            "DELETE",
            "/prompt_tables/{table_id}",
            delete_table,
            "Forgets a table here and on the engines.",
            None,
            statuses=(204,),
            others="do",
        ),
    )


def _extra_id(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 20:  # noqa: PLR2004 - digits of 2**64
        raise BadRequest("extra_id must be an integer from 1 to 2**64-1", param="extra_id")
    return int(text)
