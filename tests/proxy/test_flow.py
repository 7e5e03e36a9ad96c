"""The read path over real sockets: retries, salts, aliases, and nothing left behind."""

import asyncio

import pytest

from tests.fakes import (
    ANSWER,
    ASK,
    CHAT,
    STREAM,
    client_of,
    is_openai_error,
    proxy_over,
)


class TestRetries:
    @pytest.fixture
    async def client(self, engine, other):
        async with proxy_over(engine, other) as proxy, client_of(proxy) as client:
            client.proxy = proxy
            yield client
            await proxy.settled()

    async def test_a_refused_connection_goes_to_the_other_engine(self, engine, other, client):
        await engine.stop()
        response = await client.post(CHAT, json=ASK)
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert client.proxy.last.attempts == ["a", "b"]
        assert client.proxy.fleet.engines["a"].state == "suspect"
        assert client.proxy.fleet.engines["a"].check_now.is_set()

    @pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
    async def test_so_does_a_refusal(self, engine, other, client, status):
        async def script(exchange):
            await exchange.send({"message": "full"}, status=status)

        engine.script = script
        body = b'{"model":"m", "messages":[]}'
        response = await client.post(CHAT, content=body)
        assert response.headers["x-kvpin-engine"] == "b"
        assert len(engine.seen) == 1
        assert other.seen[0].body == body
        assert client.proxy.fleet.engines["a"].state == "ready"

    @pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
    @pytest.mark.parametrize("point", ["before headers", "after headers"])
    async def test_so_does_a_death_before_the_first_byte(self, engine, other, client, point, body):
        async def script(exchange):
            if point == "after headers":
                kind = "text/event-stream" if "stream" in body else "application/json"
                await exchange.start(headers=[("content-type", kind)])
                await asyncio.sleep(0.02)
            exchange.die(abort=point == "before headers")

        engine.script = script
        response = await client.post(CHAT, json=body)
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert (len(engine.seen), len(other.seen)) == (1, 1)

    async def test_a_whole_answer_cut_short_costs_the_client_nothing(self, engine, other, client):
        async def script(exchange):
            await exchange.start(headers=[("content-type", "application/json"), ("content-length", "100")])
            await exchange.chunk(b'{"id":')
            exchange.die()

        engine.script = script
        response = await client.post(CHAT, json=ASK)
        assert (response.json(), response.headers["x-kvpin-engine"]) == (ANSWER, "b")

    async def test_a_get_is_repeated_too(self, engine, other, client):
        await engine.stop()
        assert (await client.get("/v1/files")).headers["x-kvpin-engine"] == "b"

    async def test_when_all_are_gone_it_is_a_502_not_to_be_repeated(self, engine, other, client):
        await engine.stop()
        await other.stop()
        response = await client.post(CHAT, json=ASK)
        assert is_openai_error(response, 502, "engine_failed")
        assert response.headers["x-should-retry"] == "false"
        assert client.proxy.last.attempts == ["a", "b"]
        assert is_openai_error(await client.post(CHAT, json=ASK), 503, "no_engine")

    async def test_when_all_refuse_the_last_one_is_quoted(self, engine, other, client):
        async def script(exchange):
            await exchange.send({"error": {"message": "queue full", "code": 429}}, status=429)

        engine.script = other.script = script
        response = await client.post(CHAT, json=ASK)
        assert is_openai_error(response, 429)
        assert response.json()["error"]["message"] == "queue full"
        assert response.headers["x-should-retry"] == "false"
        assert (len(engine.seen), len(other.seen)) == (1, 1)

    async def test_an_upload_cannot_be_repeated(self, engine, other, client):
        await engine.stop()
        kind = {"content-type": "multipart/form-data; boundary=b"}
        response = await client.post("/v1/audio/transcriptions", content=b"--b--", headers=kind)
        assert is_openai_error(response, 502, "engine_failed")
        assert not other.seen

    async def test_no_more_engines_are_asked_than_retries_allow(self, engine, other):
        await engine.stop()
        async with proxy_over(engine, other, retries=0) as proxy, client_of(proxy) as client:
            assert is_openai_error(await client.post(CHAT, json=ASK), 502, "engine_failed")
        assert not other.seen
