"""Keys of clients that kvpin issues."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from proxy.api.admin.endpoint import AddKey, Endpoint, PutTable, Query, answer, decode, operation, read_bytes
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

    @operation("GET", "/keys")
    async def list_keys() -> KeyList:
        """The keys that this API issued, without the keys themselves."""
        return KeyList(keys.described(), needed=not tenants.open, in_settings=len(tenants.of_settings))

    @operation("POST", "/keys", answer=NewKey, statuses=(201,))
    async def post_key(body: AddKey) -> Response:
        """Issues a key for a tenant and tells it once; 409 without `state_dir`."""
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

    # Others read it in the file of keys, unless that cannot be written.
    @operation("DELETE", "/keys/{key_id}", others="do")
    async def delete_key(key_id: str) -> RemovedKey:
        """Removes an issued key, even if that cannot be saved; its requests in flight go on to their end."""
        return await keys.remove(key_id)

    return list_keys, post_key, delete_key


RAW = ("application/octet-stream", "application/x-safetensors")
_ID_DIGITS = 20  # of 2**64
_OF_RAW = (
    Query("id", "string", "With a raw body: the table's name; by default from its content."),
    Query("extra_id", "integer", "With a raw body: its identity; by default it is derived from the content."),
)


class TableList(msgspec.Struct):
    """All tables."""

    prompt_tables: list[TableAnswer]


def table_routes(tables: SharedTables) -> tuple[Endpoint, ...]:
    """Registers, lists and forgets prompt tables."""

    @operation("GET", "/prompt_tables")
    async def list_tables() -> TableList:
        """All registered p-tuning tables."""
        return TableList(tables.described())

    @operation("POST", "/prompt_tables", body=PutTable, raw_body=True, query=_OF_RAW, others="do")
    async def post_table(request: Request) -> TableAnswer:
        """Registers a table here and on every engine that holds tables, or nowhere."""
        raw = await read_bytes(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in RAW:
            asked = request.query_params.get("extra_id")
            is_number = asked is None or (asked.isascii() and asked.isdigit() and len(asked) <= _ID_DIGITS)
            if not is_number:
                raise BadRequest("extra_id must be an integer from 1 to 2**64-1", param="extra_id")
            extra_id = None if asked is None else int(asked)
            body = PutTable(data=raw, id=request.query_params.get("id"), extra_id=extra_id)
        else:
            read = partial(decode, raw, PutTable)
            body = await off_loop(read, ms=len(raw) / JSON_BYTES_PER_MS)
        return await tables.put(body.data, table_id=body.id, extra_id=body.extra_id)

    @operation("DELETE", "/prompt_tables/{table_id}", statuses=(204,), others="do")
    async def delete_table(table_id: str) -> None:
        """Forgets a table here and on the engines."""
        await tables.delete(table_id)

    return list_tables, post_table, delete_table
