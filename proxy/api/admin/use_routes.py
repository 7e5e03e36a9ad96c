"""What tenants have used."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from proxy.api.admin.endpoint import Endpoint, Query, answer, int_query
from proxy.core.tenant_use import MOST_DAYS, DayUse, UseBook

_USUAL_DAYS = 30


class UseList(msgspec.Struct):
    """The use of tenants, the newest day first."""

    usage: list[DayUse]


def use_routes(book: UseBook) -> tuple[Endpoint, ...]:
    """Tells the use by day, tenant and model."""

    async def list_use(request: Request) -> Response:
        days = int_query(request, "days", _USUAL_DAYS, MOST_DAYS)
        return answer(UseList(book.since(days, time.time())))

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
