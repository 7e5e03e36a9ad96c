"""Requests are admitted by their head, over real sockets: nothing is read, decoded or counted before it."""

import asyncio
import contextlib
import re
import time
from dataclasses import replace

import pytest

from engine_adapter import Hold, off_loop
from engine_adapter.off_loop import THREADS
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.types import MESSAGES_ROUTES
from proxy.api import openai
from proxy.core.quotas import TenantLimits
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import (
    ASK,
    CHAT,
    DONE,
    INFO,
    STREAM,
    FakeAdapter,
    FakeEngine,
    answer,
    client_of,
    connect_to,
    event,
    is_openai_error,
    post,
    proxy_over,
)
from tests.kv_world import until
from tests.scripts import sends

PATH = "/v1/audio/transcriptions"
KIND = "content-type: multipart/form-data; boundary=b"
KEY = "authorization: Bearer key"
BEARER = {"authorization": "Bearer key"}
LONG = 60_000
FORM = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(LONG)


def tenants_with(**limits):
    return Tenants([ApiKey.of("key", "t")], {"t": TenantLimits(**limits)})


@contextlib.asynccontextmanager
async def limited(*engines, bodies_bytes=1 << 30, **limits):
    tenants = tenants_with(**limits)
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


@pytest.mark.parametrize(
    "path", ["/v1/responses/resp_1", "/v1/files", "/v1/messages/count_tokens", "/tokenize"]
)
async def test_requests_of_every_kind_count(engine, path):
    async with limited(engine, requests_per_minute=1) as proxy, client_of(proxy, headers=BEARER) as client:
        assert (await client.post(CHAT, json=ASK)).status_code == 200
        method = "GET" if path.startswith(("/v1/resp", "/v1/files")) else "POST"
        assert (await client.request(method, path)).status_code == 429
        assert (await client.get("/v1/models")).status_code == 200  # every client asks that at its start


class TestMemory:
    @pytest.mark.parametrize("length", [LONG + 1, None], ids=["length", "chunks"])
    async def test_bodies_that_do_not_fit_are_refused_until_others_are_gone(self, engine, length):
        async with limited(engine, bodies_bytes=100_000) as proxy, client_of(proxy, headers=BEARER) as client:
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
        engine.script = sends({"text": "heard"})
        headers = BEARER | {"content-type": "audio/wav"}
        async with limited(engine, bodies_bytes=10) as proxy, client_of(proxy, headers=headers) as client:
            assert (await client.post(PATH, content=bytes(LONG))).status_code == 200
        assert len(engine.seen[0].body) == LONG


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
        tenants = tenants_with(concurrent_requests=1)
        async with proxy_over(adapter, tenants=tenants, reuse=True) as proxy:
            async with client_of(proxy, headers=BEARER) as client:

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
        async with limited(engine, concurrent_requests=1) as proxy:
            async with client_of(proxy, headers=BEARER) as client:
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
        async with (
            limited(engine, concurrent_requests=1) as proxy,
            client_of(proxy, headers=BEARER) as client,
            client.stream("POST", CHAT, json=ASK) as response,
        ):
            async for _ in response.aiter_bytes():
                assert proxy.tenants.quota("t")._running == 1
                ends.set()


COUNT = "/v1/messages/count_tokens"


@pytest.fixture
def adapter(engine, tokenizer_dir):
    info = replace(INFO, tokenizer=str(tokenizer_dir), served_as_chats=MESSAGES_ROUTES, max_model_len=1000)
    return FakeAdapter("a", engine.url, info)


@pytest.mark.parametrize("path", [CHAT, COUNT, "/v1/responses/input_tokens", "/v1/embeddings"])
async def test_what_a_quota_refuses_is_not_parsed(engine, path, monkeypatch):
    parsed = []
    monkeypatch.setattr(openai, "parse", lambda raw, _most: parsed.append(raw))
    tenants = tenants_with(requests_per_minute=1)
    async with proxy_over(engine, tenants=tenants) as proxy, client_of(proxy, headers=BEARER) as client:
        tenants.quota("t").enter(time.monotonic())
        answer = await client.post(path, content=b"x" * 900_000)
    assert answer.status_code == 429
    assert parsed == []


async def test_a_body_of_a_bad_shape_is_refused_before_it_is_decoded(engine, monkeypatch):
    decoded = []
    monkeypatch.setattr("proxy.request.bodies.JsonBody", decoded.append)
    raw = b"{" + b",".join(b'"%x":0' % i for i in range(131_073))  # no JSON, but nobody finds out
    async with proxy_over(engine, max_body_bytes=64 << 20) as proxy, client_of(proxy) as client:
        answer = await client.post(CHAT, content=raw)
        assert is_openai_error(answer, 400, "body_too_complex")
        assert 'kvpin_refused_total{reason="shape"} 1' in proxy.metrics.render().decode()
    assert decoded == engine.seen == []


async def test_a_long_body_is_parsed_in_a_thread_that_is_charged_to_its_tenant(engine):
    tenants, before = tenants_with(), THREADS.spent
    async with proxy_over(engine, tenants=tenants) as proxy, client_of(proxy, headers=BEARER) as client:
        await client.post(CHAT, json={**ASK, "user": "x" * 900_000})
    key = ("t", "parse")
    measured_s = THREADS._in_threads[key]
    assert measured_s > 0
    assert THREADS.spent[key] > before.get(key, 0.0)


@pytest.mark.parametrize("path", [CHAT, COUNT])
async def test_a_prompt_that_cannot_fit_is_not_encoded_and_is_charged(adapter, engine, path, monkeypatch):
    """Of 400,000 characters, one piece at most."""
    encoded, encode = [], ChatTokenizer.encode

    def counting(self, text, **options):
        encoded.append(len(text))
        return encode(self, text, **options)

    tenants = tenants_with(tokens_per_minute=100)
    async with (
        proxy_over(adapter, tenants=tenants, reuse=True) as proxy,
        client_of(proxy, headers=BEARER) as client,
    ):
        monkeypatch.setattr(ChatTokenizer, "encode", counting)
        ask = {**ASK, "messages": [{"role": "user", "content": "z9" * 100_000}], "max_tokens": 1}
        answer = await client.post(path, json=ask)
        assert answer.status_code == 400
        assert re.search("context is 1000 tokens; the prompt has at least|tokens > 1000 maximum", answer.text)
        assert sum(encoded) <= 65_536
        assert (await client.post(path, json=ask)).status_code == 429
    assert engine.seen == []


async def test_what_is_counted_is_charged(adapter):
    tenants = tenants_with(tokens_per_minute=5)
    ask = {**ASK, "messages": [{"role": "user", "content": "some words to count"}], "max_tokens": 1}
    async with (
        proxy_over(adapter, tenants=tenants, reuse=True) as proxy,
        client_of(proxy, headers=BEARER) as client,
    ):
        assert (await client.post(COUNT, json=ask)).status_code == 200
        assert (await client.post(COUNT, json=ask)).status_code == 429


def test_the_cpu_time_of_tenants_is_a_metric(monkeypatch):
    threads = off_loop.FairThreads(1, 1)
    monkeypatch.setattr("proxy.observe.metrics.THREADS", threads)
    for tenant, what in (("a", "parse"), ("a", "render"), ("b", "parse"), (None, "parse")):
        threads.on_loop[tenant, what] += 0.5
    name = "kvpin_tenant_cpu_seconds_total"
    assert f"{name}{{" not in Metrics(Fleet()).render().decode()
    shown = Metrics(Fleet(), tenants=1)
    shown._tenants.add("a")
    lines = re.findall(rf"^{name}{{.*$", shown.render().decode(), re.MULTILINE)
    assert lines == [
        f'{name}{{tenant="a",what="parse"}} 0.5',
        f'{name}{{tenant="a",what="render"}} 0.5',
        f'{name}{{tenant="all others",what="parse"}} 0.5',
    ]
