"""What tenants have used."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter.off_loop import off_loop
from proxy.api.admin.endpoint import Endpoint, Query, int_query
from proxy.core.tenant_use import MOST_DAYS, DayUse, UseBook

_USUAL_DAYS = 30
# Rows that are sorted and written in about 1 ms.
_ROWS_PER_MS = 256


class UseList(msgspec.Struct):
    """The use of tenants, the newest day first."""

    usage: list[DayUse]


def _written(rows: Iterator[DayUse]) -> bytes:
    """A `UseList`, encoded row by row: 100,000 rows at once would hold up the loop."""
    return b'{"usage":[%b]}' % b",".join(map(msgspec.json.encode, rows))


def use_routes(book: UseBook) -> tuple[Endpoint, ...]:
    """Tells the use by day, tenant and model."""

    async def list_use(request: Request) -> Response:
        days = int_query(request, "days", _USUAL_DAYS, MOST_DAYS)
        kept, now = UseBook(book.items()), time.time()  # the book changes meanwhile
        content = await off_loop(lambda: _written(kept.since(days, now)), ms=len(kept) / _ROWS_PER_MS)
        return Response(content, media_type="application/json")

    days = Query("days", "integer", f"How many days, 1 to {MOST_DAYS}; {_USUAL_DAYS} by default.")
    return (
        Endpoint(
            "GET",
            "/usage",
            list_use,
            "Requests and tokens by day (UTC), tenant and model, the newest day first.",
            UseList,
            query=(days,),
        ),
    )
