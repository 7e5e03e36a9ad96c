"""Prompt tables (p-tuning)."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from proxy.api.admin.endpoint import Endpoint, Query, answer, decode, read_bytes
from proxy.api.admin.request_bodies import PutTable
from proxy.control.tables import SharedTables, TableAnswer
from proxy.errors import BadRequest

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
        ),
        Endpoint(
            "DELETE",
            "/prompt_tables/{table_id}",
            delete_table,
            "Forgets a table here and on the engines.",
            None,
            statuses=(204,),
        ),
    )


def _extra_id(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 20:  # noqa: PLR2004 - digits of 2**64
        raise BadRequest("extra_id must be an integer from 1 to 2**64-1", param="extra_id")
    return int(text)
