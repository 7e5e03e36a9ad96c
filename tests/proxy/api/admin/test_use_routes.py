import time
from threading import get_ident

import httpx
import pytest

from proxy.api.admin import admin_mount, use_routes
from proxy.api.auth import AdminGuard
from proxy.core.quotas import DAY_S, UseBook

TODAY = int(time.time() // DAY_S)


@pytest.fixture
def book():
    book = UseBook()
    for ago in (0, 29, 30):
        book[TODAY - ago, "acme", "m"].requests += 1
    return book


@pytest.fixture
async def client(book):
    transport = httpx.ASGITransport(admin_mount(use_routes(book), AdminGuard(None)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/admin/v1") as client:
        yield client


async def test_days_are_counted_from_today(client):
    rows = (await client.get("/usage")).json()["usage"]
    assert [row["day"] for row in rows] == sorted((row["day"] for row in rows), reverse=True)
    assert len(rows) == 2
    assert (rows[0]["tenant"], rows[0]["model"], rows[0]["requests"]) == ("acme", "m", 1)
    assert len((await client.get("/usage?days=400")).json()["usage"]) == 3
    assert len((await client.get("/usage?days=1")).json()["usage"]) == 1


async def test_very_many_rows_are_sorted_and_written_off_the_loop(book, client, monkeypatch):
    for tenant in range(10_000):
        book[TODAY, f"t{tenant * 7919 % 10_000:05}", "m"].requests += 1
    seen, since = [], UseBook.since
    monkeypatch.setattr(UseBook, "since", lambda *args: seen.append(get_ident()) or since(*args))
    rows = (await client.get("/usage?days=400")).json()["usage"]
    assert seen != [get_ident()]
    assert len(rows) == 10_003
    tenants = [row["tenant"] for row in rows if row["day"] == rows[0]["day"]]
    assert tenants == sorted(tenants)


@pytest.mark.parametrize("days", ["0", "401", "x"])
async def test_a_number_of_days_that_is_none(client, days):
    assert (await client.get("/usage", params={"days": days})).status_code == 400
