"""What a page of another origin can do: stream a chat where its origin is listed, nothing elsewhere."""

from __future__ import annotations

import asyncio
import json

import pytest
from playwright.async_api import Error

from proxy.api.openai import DataPlane
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import DONE, FakeEngine, event, proxy_over
from tests.live.conftest import ENGINE, running_kvpin

TOKENS = 5


@pytest.fixture
def methods(monkeypatch):
    """The methods that reached the data plane."""
    seen, serve = [], DataPlane.serve

    async def noting(self, exchange):
        seen.append(exchange.method)
        await serve(self, exchange)

    monkeypatch.setattr(DataPlane, "serve", noting)
    return seen


@pytest.fixture
async def engine():
    async with FakeEngine("a") as engine:
        yield engine


@pytest.fixture
async def proxy(engine, origin):
    """A proxy that needs a key and allows pages of `origin`."""
    tenants = Tenants([ApiKey.of("key", "t")])
    async with proxy_over(engine, tenants=tenants, cors_origins=(origin,)) as proxy:
        yield proxy


async def test_each_event_arrives_before_the_next_one_is_made(engine, proxy, page, methods):
    """The engine makes an event only when the page has read the one before it."""
    is_read = [asyncio.Event() for _ in range(TOKENS)]

    async def script(exchange):
        await exchange.start()
        for number in range(TOKENS):
            await exchange.chunk(event({"choices": [{"index": 0, "delta": {"content": str(number)}}]}))
            await asyncio.wait_for(is_read[number].wait(), 60)
        await exchange.chunk(DONE)
        await exchange.end()

    engine.script = script
    answer = asyncio.create_task(page.evaluate("url => window.stream(url, 'm')", proxy.url))
    for number in range(TOKENS):
        await page.wait_for_function("number => window.events.length > number", arg=number, timeout=60_000)
        is_read[number].set()
    assert await answer == {"status": 200, "engine": "a"}
    events = await page.evaluate("window.events")
    assert [each["data"] for each in events[-1:]] == ["[DONE]"]
    texts = [json.loads(each["data"])["choices"][0]["delta"]["content"] for each in events[:-1]]
    assert texts == [str(number) for number in range(TOKENS)]
    assert methods == ["OPTIONS", "POST"]


async def test_a_page_of_an_origin_that_is_not_listed_gets_nothing(engine, proxy, page, methods):
    proxy.site.data_plane.cors.__init__(["https://chat.example"])
    with pytest.raises(Error, match="Failed to fetch"):
        await page.evaluate("url => window.stream(url, 'm')", proxy.url)
    assert await page.evaluate("window.events") == []
    assert methods == ["OPTIONS"]  # the request itself was never sent
    assert not engine.seen


async def test_openai_node_in_a_page_streams_from_a_kvpin_of_its_own(page, origin, tmp_path):
    """`kvpin serve` with the embedded engine, as an operator starts it."""
    flags = ("--managed", ENGINE, "--api-key", "key", "--admin-key", "admin", "--cors-origin", origin)
    manager = running_kvpin(tmp_path / "log", *flags, tokenised=False)
    kvpin = await asyncio.to_thread(manager.__enter__)
    try:
        model = await page.evaluate(
            "async url => (await (await fetch(url + '/v1/models', {headers: {authorization: 'Bearer key'}}))"
            ".json()).data[0].id",
            kvpin.url,
        )
        chunks = await page.evaluate("([url, model]) => window.ask(url, model)", [kvpin.url, model])
        assert len(chunks) > 2
        assert "".join(chunks)
        with pytest.raises(Error, match="Failed to fetch"):  # not from a page, key or not
            await page.evaluate(
                "url => fetch(url + '/admin/v1/stats', {headers: {authorization: 'Bearer admin'}})", kvpin.url
            )
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
