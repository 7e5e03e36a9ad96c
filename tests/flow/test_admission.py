"""Requests are admitted by their head, over real sockets: before their body is read or anything runs."""

import asyncio
import contextlib
import json

import pytest

from engine_adapter import Hold
from proxy.core.quotas import TenantLimits
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import (
    ASK,
    CHAT,
    DONE,
    STREAM,
    FakeAdapter,
    FakeEngine,
    answer,
    client_of,
    connect_to,
    event,
    post,
    proxy_over,
)
from tests.kv_world import until

PATH = "/v1/audio/transcriptions"
KIND = "content-type: multipart/form-data; boundary=b"
KEY = "authorization: Bearer key"
LONG = 60_000
FORM = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(LONG)


@contextlib.asynccontextmanager
async def limited(*engines, bodies_bytes=1 << 30, **limits):
    tenants = Tenants([ApiKey.of("key", "t")], {"t": TenantLimits(**limits)})
    async with proxy_over(*engines, tenants=tenants, bodies_bytes=bodies_bytes) as proxy:
        yield proxy
        await proxy.settled()
        assert proxy.bodies.used == 0
        assert tenants.quota("t").take().running == 0


class Unfinished:
    """A request whose body is not complete."""

    @classmethod
    async def begin(cls, proxy, path=CHAT, body=b"x" * LONG, *headers, length=LONG + 1):
        self = cls()
        head = post(path, body, KEY, *headers)
        declared = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        if length is None:
            head = head[: -len(body)] + b"%x\r\n%b\r\n" % (len(body), body)
        self.reader, self.writer = await connect_to(proxy)
        self.writer.write(head.replace(b"content-length: %d" % len(body), declared, 1))
        return self

    async def answer(self):
        try:
            return await asyncio.wait_for(self.reader.read(), 20)
        finally:
            await self.leave()

    async def leave(self):
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@pytest.mark.parametrize(
    ("path", "headers"), [(CHAT, ()), (PATH, (KIND,)), ("/v1/messages/count_tokens", ()), ("/tokenize", ())]
)
async def test_a_tenant_with_one_request_at_a_time_holds_one_unfinished_body(engine, path, headers):
    async with limited(engine, concurrent_requests=1) as proxy:
        first = await Unfinished.begin(proxy, path, FORM, *headers, length=len(FORM) + 9)
        await until(lambda: proxy.tenants.quota("t")._running)
        for _ in range(3):
            second = await Unfinished.begin(proxy, path, b"", *headers, length=1 << 20)
            answer = await second.answer()
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"the limit concurrent_requests = 1 is reached" in answer
        record = proxy.last
        assert (record.status, record.cause, record.tenant, record.route) == (429, "quota", "t", path)
        assert 'kvpin_refused_total{reason="limit"} 3' in proxy.metrics.render().decode()
        await first.leave()
        await until(lambda: not proxy.tenants.quota("t")._running)


async def test_who_is_refused_is_not_invited_to_send_its_body(engine):
    async with limited(engine, requests_per_minute=1) as proxy:
        for start in (b"HTTP/1.1 100 ", b"HTTP/1.1 429 "):
            asked = await Unfinished.begin(proxy, CHAT, b"", "expect: 100-continue")
            assert (await asyncio.wait_for(asked.reader.readuntil(b"\r\n"), 20)).startswith(start)
            await asked.leave()
        await until(lambda: not proxy.tenants.quota("t")._running)


@pytest.mark.parametrize(
    "path", ["/v1/responses/resp_1", "/v1/files", "/v1/messages/count_tokens", "/tokenize"]
)
async def test_requests_of_every_kind_count(engine, path):
    headers = {"authorization": "Bearer key"}
    async with limited(engine, requests_per_minute=1) as proxy, client_of(proxy, headers=headers) as client:
        assert (await client.post(CHAT, json=ASK)).status_code == 200
        method = "GET" if path.startswith(("/v1/resp", "/v1/files")) else "POST"
        assert (await client.request(method, path)).status_code == 429
        assert (await client.get("/v1/models")).status_code == 200  # every client asks that at its start


class TestMemory:
    @pytest.mark.parametrize("length", [LONG + 1, None], ids=["length", "chunks"])
    async def test_bodies_that_do_not_fit_are_refused_until_others_are_gone(self, engine, length):
        async with limited(engine, bodies_bytes=100_000) as proxy, client_of(proxy) as client:
            first = await Unfinished.begin(proxy, length=length)
            await until(lambda: proxy.bodies.used == LONG)
            refused = await (await Unfinished.begin(proxy, length=length)).answer()
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b'"code":"overloaded"' in refused
            assert b"retry-after: 1\r\n" in refused
            page = proxy.metrics.render().decode()
            assert 'kvpin_refused_total{reason="memory"} 1' in page
            assert f"kvpin_body_bytes {LONG}" in page
            await first.leave()
            await until(lambda: proxy.bodies.used == 0)
            long = {**ASK, "user": "x" * LONG}
            client.headers["authorization"] = "Bearer key"
            assert (await client.post(CHAT, json=long)).status_code == 200

    async def test_forms_that_are_kept_count(self, engine):
        async with FakeEngine("b") as other, limited(engine, bodies_bytes=100_000) as proxy:
            proxy.add(other, model="another")
            first = await Unfinished.begin(proxy, PATH, FORM, KIND, length=None)
            await until(lambda: proxy.bodies.used == len(FORM))
            refused = await (await Unfinished.begin(proxy, PATH, FORM, KIND, length=None)).answer()
            assert refused.startswith(b"HTTP/1.1 503 ")
            await first.leave()
            await until(lambda: proxy.bodies.used == 0)

    async def test_an_upload_that_is_passed_on_as_it_arrives_takes_none(self, engine):
        async def take(exchange):
            await exchange.send({"text": "heard"})

        engine.script = take
        headers = {"authorization": "Bearer key", "content-type": "audio/wav"}
        async with limited(engine, bodies_bytes=10) as proxy, client_of(proxy, headers=headers) as client:
            assert (await client.post(PATH, content=bytes(LONG))).status_code == 200
        assert len(engine.seen[0].body) == LONG

    async def test_a_body_is_free_when_its_answer_begins(self, engine):
        released = asyncio.Event()

        async def script(exchange):
            assert proxy.bodies.used > LONG
            await exchange.start()
            await exchange.chunk(event({"choices": [{"delta": {"content": "x"}}]}))
            await released.wait()
            await exchange.chunk(DONE)
            await exchange.end()

        engine.script = script
        headers = {"authorization": "Bearer key"}
        async with limited(engine) as proxy, client_of(proxy, headers=headers) as client:
            body = json.dumps({**STREAM, "user": "x" * LONG})
            async with client.stream("POST", CHAT, content=body) as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_bytes():
                    assert proxy.bodies.used == 0
                    released.set()


class Settling(FakeAdapter):
    """An adapter that is not done with a request when its answer is: it saves a slot, as for llama-server."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.settles = asyncio.Event()
        self.unsettled = 0

    @contextlib.asynccontextmanager
    async def hold(self, _path, body, _prompt):
        yield Hold(body)
        self.unsettled += 1
        await self.settles.wait()


async def say(exchange):
    if exchange.target == CHAT and exchange.json.get("user") == "bad":
        await exchange.send({"error": {"message": "no", "type": "invalid_request_error"}}, status=400)
    elif exchange.headers.get("content-type") == "audio/wav":
        await exchange.send({"text": "heard"})
    else:
        await answer(exchange)


class TestPlace:
    """A client that sends one request after the other needs one place."""

    @pytest.fixture
    async def asked(self, engine):
        engine.script = say
        adapter = Settling("a", engine.url)
        tenants = Tenants([ApiKey.of("key", "t")], {"t": TenantLimits(concurrent_requests=1)})
        headers = {"authorization": "Bearer key"}
        async with proxy_over(adapter, tenants=tenants, reuse=True) as proxy:
            async with client_of(proxy, headers=headers) as client:

                async def twice(path, **request):
                    for _ in range(2):
                        yield await client.post(path, **request)
                    assert adapter.unsettled >= 2
                    assert tenants.quota("t").take().running == proxy.bodies.used == 0

                yield twice
            adapter.settles.set()
            await proxy.settled()
            assert tenants.quota("t").take().running == 0

    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [
            (CHAT, ASK, 200),
            (CHAT, STREAM, 200),
            (CHAT, {**ASK, "user": "bad"}, 400),
            (CHAT, {**ASK, "n": 2}, 200),
            (CHAT, {**STREAM, "n": 2}, 200),
            ("/v1/messages", {**STREAM, "max_tokens": 4}, 200),
            ("/v1/embeddings", {"model": "m", "input": "hi"}, 200),
        ],
    )
    async def test_is_free_when_the_client_has_the_end_of_its_answer(self, asked, path, body, status):
        assert [each.status_code async for each in asked(path, json=body)] == [status] * 2

    async def test_is_free_after_an_upload(self, asked):
        request = {"content": bytes(LONG), "headers": {"content-type": "audio/wav"}}
        assert [each.status_code async for each in asked(PATH, **request)] == [200] * 2

    async def test_is_free_after_the_last_event_of_a_stream_that_goes_on(self, engine):
        """Most clients read no further than [DONE]."""
        ends = asyncio.Event()

        async def script(exchange):
            await exchange.start()
            await exchange.chunk(event({"choices": [{"delta": {"content": "x"}}]}) + DONE)
            await ends.wait()
            await exchange.end()

        engine.script = script
        headers = {"authorization": "Bearer key"}
        async with limited(engine, concurrent_requests=1) as proxy:
            async with client_of(proxy, headers=headers) as client:
                for _ in range(2):
                    async with client.stream("POST", CHAT, json=STREAM) as response:
                        assert response.status_code == 200
                        async for chunk in response.aiter_bytes():
                            if chunk.endswith(DONE):
                                break
            ends.set()

    async def test_is_taken_while_a_body_that_is_no_stream_goes_on(self, engine):
        """An engine's file may hold what ends a stream of events."""
        ends = asyncio.Event()

        async def script(exchange):
            await exchange.start(headers=(("content-type", "text/plain"),))
            await exchange.chunk(b"x\n" + DONE)
            await ends.wait()
            await exchange.end()

        engine.script = script
        headers = {"authorization": "Bearer key"}
        async with (
            limited(engine, concurrent_requests=1) as proxy,
            client_of(proxy, headers=headers) as client,
            client.stream("POST", CHAT, json=ASK) as response,
        ):
            async for _ in response.aiter_bytes():
                assert proxy.tenants.quota("t")._running == 1
                ends.set()
