"""p-tuning tables."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from proxy.api.admin.answers import TableAnswer, TableList
from proxy.api.admin.bodies import PutTable
from proxy.api.admin.endpoint import Endpoint, Query, answer, decode, read_bytes
from proxy.control import Control
from proxy.control.tables import delete_table, describe_table, put_table
from proxy.errors import BadRequest

RAW = ("application/octet-stream", "application/x-safetensors")


async def list_tables(control: Control, _request: Request) -> Response:
    """All tables."""
    return answer(TableList, {"prompt_tables": [describe_table(table) for table in control.tables.list()]})


async def post_table(control: Control, request: Request) -> Response:
    """Registers a table here and on every engine that holds tables."""
    raw = await read_bytes(request, control.max_body_bytes)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in RAW:
        extra_id = _extra_id(request.query_params.get("extra_id"))
        body = PutTable(data=raw, id=request.query_params.get("id"), extra_id=extra_id)
    else:
        body = decode(raw, PutTable)
    table = await put_table(control, body.data, table_id=body.id, extra_id=body.extra_id)
    return answer(TableAnswer, describe_table(table))


async def delete_prompt_table(control: Control, request: Request) -> Response:
    """Forgets a table."""
    await delete_table(control, request.path_params["table_id"])
    return Response(status_code=204)


def _extra_id(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 20:  # noqa: PLR2004 - digits of 2**64
        raise BadRequest("extra_id must be an integer from 1 to 2**64-1", param="extra_id")
    return int(text)


ENDPOINTS = (
    Endpoint("GET", "/prompt_tables", list_tables, "All registered p-tuning tables.", TableList),
    Endpoint(
        "POST",
        "/prompt_tables",
        post_table,
        "Registers a table here and on every engine that holds tables, or nowhere.",
        TableAnswer,
        body=PutTable,
        raw_body=True,
        query=(
            Query("id", "string", "What requests will name, with a raw body; derived from its content."),
            Query("extra_id", "integer", "Its identity, with a raw body; derived from its content."),
        ),
    ),
    Endpoint(
        "DELETE",
        "/prompt_tables/{table_id}",
        delete_prompt_table,
        "Forgets a table here and on the engines.",
        None,
        statuses=(204,),
    ),
)
