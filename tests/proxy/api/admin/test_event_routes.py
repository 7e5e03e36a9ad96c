"""The stream over real sockets, with a real proxy and a scripted engine."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import msgspec

from proxy.server.app import build_app
from tests.fakes import ASK, CHAT, FakeEngine, serving
from tests.kv_world import KvFake, kv_world, until

WORDS = "a prompt that nobody else may read"


@asynccontextmanager
async def watched(tokenizer_dir, **settings):
    """A world that is served, and a client of it."""
    async with kv_world(tokenizer_dir, **settings) as world, FakeEngine("a") as engine:
        world.add(KvFake("a", url=engine.url))
        async with (
            serving(build_app(world.proxy)) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as client,
        ):
            yield world, client


async def events(answer):
    """The events as they come: name and data."""
    name = None
    async for line in answer.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, msgspec.json.decode(value)


async def next_of(stream, name):
    """The next event of that name, and all of the stream's text on the way."""
    async with asyncio.timeout(30):
        async for each, data in stream:
            if each == name:
                return data
    return None


async def test_a_request_is_seen_as_it_passes(tokenizer_dir, monkeypatch):
    monkeypatch.setattr("proxy.control.live.TICK_S", 0.1)
    async with watched(tokenizer_dir) as (world, client), client.stream("GET", "/admin/v1/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache, no-transform"
        stream = events(answer)
        snapshot = await next_of(stream, "snapshot")
        assert [engine["id"] for engine in snapshot["engines"]] == ["a"]
        body = {**ASK, "messages": [{"role": "user", "content": WORDS}]}
        served = await client.post(CHAT, json=body)
        placed, finished = await next_of(stream, "placed"), await next_of(stream, "finished")
        assert placed["request_id"] == finished["request_id"] == served.headers["x-request-id"]
        assert placed["n_tokens"] > 0
        assert (finished["status"], finished["reported_tokens"]) == (200, 32)
        assert "nobody" not in str((placed, finished))
        assert (await next_of(stream, "snapshot"))["requests"] == 1
        assert len(world.proxy.live.viewers) == 1
        await answer.aclose()
        await until(lambda: not world.proxy.live.viewers)


async def test_it_needs_the_admin_key_and_a_new_one_after_a_reload(tokenizer_dir):
    async with watched(tokenizer_dir, admin_key="old") as (world, client):
        assert (await client.get("/admin/v1/events")).status_code == 401
        headers = {"authorization": "Bearer old"}
        async with client.stream("GET", "/admin/v1/events", headers=headers) as answer:
            stream = events(answer)
            await next_of(stream, "snapshot")
            world.proxy.reload(world.proxy.settings)
            assert await next_of(stream, "nothing") is None  # it has ended


async def test_head_gets_the_headers_alone(tokenizer_dir):
    async with watched(tokenizer_dir) as (world, client):
        answer = await client.head("/admin/v1/events")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
        assert not world.proxy.live.viewers
