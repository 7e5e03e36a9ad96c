"""The data plane on real sockets: what it lets in, and clients that leave."""

import asyncio
import contextlib
import gzip
import json

import pytest
import structlog
import zstandard

from engine_adapter import Capability
from proxy.api import openai
from proxy.fleet.destinations import Destinations
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import (
    ASK,
    CHAT,
    DONE,
    STREAM,
    FakeAdapter,
    connect_to,
    event,
    is_openai_error,
    post,
    proxy_over,
)

UPLOAD = post("/v1/audio/transcriptions", b"one", "content-type: multipart/form-data; boundary=b")


class TestClientLeaves:
    """The engine must learn at once, and nothing of the request may stay behind."""

    @staticmethod
    async def gone(exchange):
        await asyncio.wait_for(exchange.left.wait(), 5)

    @staticmethod
    async def wait_forever(exchange):
        await exchange.left.wait()

    @pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
    async def test_before_the_first_byte(self, engine, proxy, body):
        engine.script = self.wait_forever
        _, writer = await connect_to(proxy)
        writer.write(post(CHAT, json.dumps(body).encode()))
        exchange = await engine.request()
        writer.close()
        await self.gone(exchange)
        await proxy.settled()
        assert (proxy.last.status, proxy.last.error) == (499, "the client left")
        assert proxy.fleet.engines["a"].state == "ready"

    async def test_during_a_stream(self, engine, proxy, client):
        async def script(exchange):
            await exchange.start()
            await exchange.chunk(b"data: 1\n\n")
            await exchange.left.wait()

        engine.script = script
        async with client.stream("POST", CHAT, json=STREAM) as response:
            async for _ in response.aiter_raw():
                break
        await self.gone(engine.seen[0])
        await proxy.settled()
        assert proxy.last.status == 499
        assert proxy.last.first_byte_s > 0  # counts, although nobody read the rest

    async def test_after_the_last_event_of_a_stream_that_its_engine_does_not_end(
        self, engine, proxy, client, monkeypatch
    ):
        """It has its answer: OpenAI's SDKs read no further than [DONE]."""
        monkeypatch.setattr(openai, "ENGINE_END_S", 0.1)

        async def script(exchange):
            await exchange.start()
            await exchange.chunk(event({"choices": [{"delta": {"content": "x"}}]}) + DONE)
            await exchange.left.wait()

        engine.script = script
        async with client.stream("POST", CHAT, json=STREAM) as response:
            async for _ in response.aiter_raw():
                break
        await self.gone(engine.seen[0])
        await proxy.settled()
        assert (proxy.last.status, proxy.last.error, proxy.last.cause) == (200, None, "answered")

    async def test_on_done_is_no_cancellation(self, engine, proxy):
        finish = asyncio.Event()

        async def script(exchange):
            await exchange.start()
            await exchange.chunk(event({"usage": {"prompt_tokens_details": {"cached_tokens": 7}}}))
            await exchange.chunk(DONE)
            await finish.wait()
            await exchange.end()

        engine.script = script
        reader, writer = await connect_to(proxy)
        writer.write(post(CHAT, json.dumps(STREAM).encode()))
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), 5)
        writer.close()
        await asyncio.sleep(0.05)
        finish.set()
        await proxy.settled()
        assert (proxy.last.error, proxy.last.status, proxy.last.reported_tokens) == (None, 200, 7)
        assert not engine.seen[0].left.is_set()

    async def test_in_the_middle_of_its_body(self, engine, proxy, client):
        _, writer = await connect_to(proxy)
        writer.write(post(CHAT, b'{"model": "m"}').replace(b"content-length: 14", b"content-length: 99"))
        await asyncio.sleep(0.05)
        writer.close()
        assert (await client.post(CHAT, json=ASK)).status_code == 200
        assert len(engine.seen) == 1

    @pytest.mark.parametrize("is_answered", [False, True])
    async def test_in_the_middle_of_an_upload_the_engine_is_not_to_blame(self, engine, proxy, is_answered):
        async def script(exchange):
            await exchange.receive(b"one")
            if is_answered:
                await exchange.start()
                await exchange.chunk(b"so far so good\n\n")
            await exchange.left.wait()

        script.reads_body = False
        engine.script = script
        reader, writer = await connect_to(proxy)
        writer.write(UPLOAD.replace(b"content-length: 3", b"content-length: 99"))
        exchange = await engine.request()
        if is_answered:
            await asyncio.wait_for(reader.readuntil(b"good"), 5)
        writer.close()
        await self.gone(exchange)
        await proxy.settled()
        assert proxy.fleet.engines["a"].state == "ready"


PIECE = event({"choices": [{"index": 0, "delta": {"content": "1"}}]})


class TestStopping:
    """When the grace is over, the server cancels what is left."""

    @staticmethod
    async def cancelled(engine, proxy, script, begins_with=b""):
        engine.script = script
        reader, writer = await connect_to(proxy)
        writer.write(post(CHAT, json.dumps(STREAM).encode()))
        exchange = await engine.request()
        begun = await asyncio.wait_for(reader.readuntil(begins_with), 5) if begins_with else b""
        (task,) = (each for each in asyncio.all_tasks() if "DataPlane.serve" in repr(each.get_coro()))
        task.cancel()
        answer = begun + await asyncio.wait_for(reader.read(), 5)
        await TestClientLeaves.gone(exchange)
        writer.close()
        return answer

    async def test_before_the_first_byte_it_is_a_503(self, engine, proxy):
        answer = await self.cancelled(engine, proxy, TestClientLeaves.wait_forever)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in head
        assert json.loads(body)["error"]["message"].startswith("kvpin is stopping")

    async def test_an_answer_that_has_begun_stays_unfinished(self, engine, proxy):
        async def script(exchange):
            await exchange.start()
            await exchange.chunk(PIECE)
            await exchange.left.wait()

        answer = await self.cancelled(engine, proxy, script, PIECE)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert PIECE in answer
        assert b"kvpin is stopping" in answer.rpartition(b"data: ")[2]


class TestRefusals:
    @pytest.mark.parametrize("error", [KeyError("a secret"), TimeoutError("a secret")])
    async def test_a_bug_is_a_500_that_tells_nothing(self, proxy, client, monkeypatch, error):
        def bug(_destinations, _call):
            raise error

        monkeypatch.setattr(Destinations, "by_model_alone", bug)
        with structlog.testing.capture_logs() as logs:
            response = await client.post(CHAT, json=ASK)
        assert is_openai_error(response, 500, "internal_error")
        assert "secret" not in response.text
        assert [line["event"] for line in logs] == ["request crashed"]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (CHAT, b"{"),
            ("/v1/embeddings", b"no JSON"),
            ("/v1/messages", b""),
            ("/v1/messages?beta=true", b""),
            ("/v1/messages/count_tokens", b""),
            ("/v1/responses/input_tokens", b""),
        ],
    )
    async def test_a_body_that_is_no_json_object_gets_a_record(self, proxy, engine, client, path, body):
        answer = await client.post(path, content=body)
        record = proxy.last
        assert (record.route, record.status, record.cause) == (path.partition("?")[0], 400, "invalid")
        assert (answer.status_code, record.error) == (400, answer.json()["error"]["message"])
        assert not engine.seen
        assert proxy.metrics.ended == 1

    @pytest.mark.parametrize("kind", ["audio/wav", "multipart/form-data; boundary=b"])
    @pytest.mark.parametrize("path", [CHAT, "/v1/chat%2fcompletions", "/v1//completions", "/v1/embeddings"])
    async def test_a_prompt_under_a_content_type_of_files_is_read_like_any(self, engine, client, path, kind):
        """Unread, it would reach the engine without its tenant's salt."""
        headers = {"content-type": kind}
        assert is_openai_error(await client.post(path, content=b"--b", headers=headers), 400, "invalid_json")
        assert not engine.seen
        content = json.dumps(ASK | {"cache_salt": 5}).encode()
        assert is_openai_error(await client.post(CHAT, content=content, headers=headers), 400)
        assert not engine.seen

    @pytest.mark.parametrize(
        ("path", "headers", "body"),
        [
            (CHAT, {"content-encoding": "zstd"}, zstandard.compress(b" " * (2 << 20))),
            ("/v1/audio/x", {}, "chunked"),
            ("/v1/audio/x", {"content-type": "multipart/form-data; boundary=b"}, "chunked"),
        ],
        ids=["compressed", "chunked", "an upload"],
    )
    async def test_a_body_that_is_too_long(self, engine, proxy, client, path, headers, body):
        async def chunks():
            for _ in range(32):
                yield b" " * 65536

        response = await client.post(path, content=chunks() if body == "chunked" else body, headers=headers)
        assert is_openai_error(response, 413, "body_too_large")
        assert proxy.fleet.engines["a"].state == "ready"
        assert (await client.post(CHAT, json=ASK)).status_code == 200

    async def test_a_compressed_body_reaches_the_engine_plain(self, engine, client):
        plain = json.dumps(ASK).encode()
        headers = {"content-encoding": "gzip"}
        assert (await client.post(CHAT, content=gzip.compress(plain), headers=headers)).status_code == 200
        (seen,) = engine.seen
        assert seen.body == plain
        assert "content-encoding" not in seen.headers
        assert seen.headers["content-length"] == str(len(plain))

    async def test_an_unknown_encoding_of_a_body(self, engine, client):
        response = await client.post(CHAT, content=b"...", headers={"content-encoding": "br"})
        assert is_openai_error(response, 415, "encoded_body")
        assert "'br'" in response.json()["error"]["message"]
        assert not engine.seen
        plain = await client.post(CHAT, json=ASK, headers={"content-encoding": "identity"})
        assert plain.status_code == 200

    async def test_a_byte_order_mark_is_left_out(self, engine, client):
        plain = json.dumps(ASK).encode()
        assert (await client.post(CHAT, content=b"\xef\xbb\xbf" + plain)).status_code == 200
        assert engine.seen[0].body == plain

    async def test_an_upload_too_long_while_it_is_answered_breaks_off(self, engine, proxy):
        async def script(exchange):
            await exchange.receive(b"one")
            await exchange.start()
            await exchange.chunk(b"so far so good\n\n")
            await exchange.left.wait()

        script.reads_body = False
        engine.script = script
        reader, writer = await connect_to(proxy)
        head = UPLOAD.replace(b"content-length: 3", b"transfer-encoding: chunked")
        writer.write(head.replace(b"one", b"3\r\none\r\n"))
        await asyncio.wait_for(reader.readuntil(b"good"), 5)
        writer.write(b"%x\r\n%b\r\n" % (2 << 20, b" " * (2 << 20)))
        with contextlib.suppress(ConnectionResetError):
            assert b"0\r\n\r\n" not in await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await proxy.settled()
        assert proxy.fleet.engines["a"].state == "ready"


class TestOptions:
    @pytest.mark.parametrize(
        ("path", "allow"),
        [
            ("/v1/models", "GET, HEAD, OPTIONS"),
            ("/v1/models/m", "GET, HEAD, OPTIONS"),
        ],
    )
    async def test_it_names_the_methods(self, engine, client, path, allow):
        response = await client.options(path)
        assert (response.status_code, response.headers["allow"], response.content) == (204, allow, b"")
        assert not engine.seen

    async def test_of_no_route_it_is_a_404(self, client):
        assert is_openai_error(await client.options("/v1/load_lora_adapter"), 404)

    async def test_other_methods_are_for_engines_to_judge(self, engine, client):
        await client.request("PATCH", "/v1/files/f")
        assert (engine.seen[0].method, engine.seen[0].target) == ("PATCH", "/v1/files/f")


class TestKeys:
    @pytest.fixture
    async def proxy(self, engine):
        tenants = Tenants([ApiKey.of("key-a", "alice"), ApiKey.of("key-b", "bob")])
        async with proxy_over(tenants=tenants) as proxy:
            proxy.add(FakeAdapter("a", engine.url), capabilities=frozenset({Capability.CACHE_SALT}))
            yield proxy
            await proxy.settled()

    async def test_the_key_that_a_client_sends_stays_here(self, engine, proxy, client):
        for headers in ({"authorization": "bearer key-a"}, {"x-api-key": "key-b"}):
            assert (await client.post(CHAT, json=ASK, headers=headers)).status_code == 200
        assert [record.tenant for record in proxy.requests] == ["alice", "bob"]
        assert not any("key-" in value for exchange in engine.seen for value in exchange.headers.values())

    async def test_tenants_have_salts_that_they_cannot_choose(self, engine, proxy, client):
        async def salt(key, body):
            headers = {"authorization": f"Bearer {key}"}
            response = await client.post(CHAT, content=body, headers=headers)
            assert response.status_code == 200, response.text
            assert engine.seen[-1].body.count(b"salt") == 1
            return engine.seen[-1].json["cache_salt"]

        alice, bob = await salt("key-a", b'{"model":"m"}'), await salt("key-b", b'{"model":"m"}')
        assert alice != bob
        for body in (
            b'{"model":"m","cache_salt":"%s"}' % alice.encode(),
            b'{"model":"m","cache_salt":"%s","cache_salt":"x"}' % alice.encode(),
            b'{"model":"m","cache_salt":"x","cache\\u005fsalt":"%s"}' % alice.encode(),
        ):
            mine = await salt("key-b", body)
            assert mine.startswith(bob)
            assert mine not in (alice, bob)
