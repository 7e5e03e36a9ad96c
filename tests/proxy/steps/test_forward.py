"""Passing requests and answers on, byte for byte, over real sockets."""

import asyncio
import json
import socket
import threading
from dataclasses import replace

import httpx
import pytest

from engine_adapter import EngineUnavailable, Hold
from engine_adapter.llama_server.options import ROUTES
from engine_adapter.llama_server.requests import SlotsAnswer
from proxy.request import calls
from tests.fakes import ANSWER, ASK, CHAT, DONE, INFO, STREAM, client_of, event, post, proxy_over
from tests.holding import HoldingAdapter, Reader
from tests.scripts import EVENTS, dies, sends, streams


class TestPassingOn:
    async def test_bytes_go_both_ways_unchanged(self, engine, client):
        body = b'{ "model":"m",\t"messages" : [ ], "temperature":0.10, "x":"\\u0041\xc3\xa9", "big":1e3 }'
        content = b'{ "id" : "x",\n "choices": [{"message" : {"content":"\\u0041"}} ],  "usage":null }'
        engine.script = sends(content)
        response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert engine.seen[0].body == body
        assert response.content == content

    async def test_headers_that_end_at_a_proxy_do_not_pass(self, engine, client):
        told = [
            ("x-engine", "1"), ("set-cookie", "a=1"), ("set-cookie", "b=2"), ("server", "engine"),
            ("x-request-id", "engines-own"), ("keep-alive", "timeout=5"), ("x-kv-cached-tokens", "5"),
            ("x-odd", "zażółć"), ("x-kvpin-forged", "1"), ("x-kvpin-engine", "forged"),
        ]  # fmt: skip
        engine.script = sends(ANSWER, headers=told)
        sent = {
            "x-client": "1", "authorization": "Bearer client-key", "x-api-key": "k", "te": "trailers",
            "x-kvpin-engine": "z", "accept-encoding": "gzip, br",
        }  # fmt: skip
        response = await client.post(CHAT, json=ASK, headers=sent)
        seen = engine.seen[0].headers
        assert seen["x-client"] == "1"
        assert seen["accept-encoding"] == "identity"
        assert seen["host"] == engine.url.removeprefix("http://")
        assert (seen["authorization"], seen["x-api-key"]) == ("Bearer client-key", "k")  # none of kvpin's own
        assert not {"te", "x-kvpin-engine"} & set(seen)
        assert response.headers["x-engine"] == "1"
        assert not {"set-cookie", "x-kvpin-forged"} & set(response.headers)
        assert "server" not in response.headers
        assert "keep-alive" not in response.headers
        assert dict(response.headers.raw)[b"x-odd"] == "zażółć".encode()
        assert response.headers["x-kvpin-cached-tokens"] == "5"
        assert response.headers["x-kvpin-engine"] == "a"
        assert response.headers["x-kvpin-predicted-tokens"] == "0"
        assert response.headers["x-request-id"].startswith("req-")

    @pytest.mark.parametrize(
        ("told", "passed_on"),
        [
            ("{engine}/v1/files?a=b", "/v1/files?a=b"),
            ("/v1/files", "/v1/files"),
            ("https://elsewhere.example/v1/files", None),
            ("{engine}0/v1/files", None),
        ],
    )
    async def test_a_redirection_to_the_engine_leads_to_kvpin(self, engine, client, told, passed_on):
        location = told.format(engine=engine.url.rstrip("/"))
        engine.script = sends(b"", 307, [("location", location)])
        response = await client.get("/v1/files/")
        assert response.headers.get("location") == passed_on

    async def test_what_an_engine_says_with_a_stream_comes_with_it(self, engine, proxy, client):
        said = {"x-ratelimit-remaining-requests": "9", "retry-after": "3", "x-kv-cached-tokens": "16"}
        engine.script = streams(DONE, headers=[*EVENTS, *said.items()])
        response = await client.post(CHAT, json=STREAM)
        assert response.headers.items() >= {"x-ratelimit-remaining-requests": "9", "retry-after": "3"}.items()
        assert response.headers["x-kvpin-cached-tokens"] == "16"
        assert proxy.last.reported_tokens == 16

    async def test_any_v1_route_and_method_passes(self, engine, client):
        for method, path in [("GET", "/v1/files?after=a%20b&x=%2F"), ("DELETE", "/v1/responses/r%2F1")]:
            assert (await client.request(method, path)).status_code == 200
            assert (engine.seen[-1].method, engine.seen[-1].target) == (method, path)
            assert "transfer-encoding" not in engine.seen[-1].headers
            assert engine.seen[-1].body == b""

    async def test_head_passes_without_a_body(self, engine, client):
        async def script(exchange):
            await exchange.start(200, [("content-type", "application/json"), ("content-length", "17")])
            exchange.ended = True

        engine.script = script
        response = await client.head("/v1/files")
        assert (response.status_code, response.headers["content-length"]) == (200, "17")
        assert (await client.head("/v1/files")).status_code == 200

    async def test_a_multipart_upload_is_streamed_through(self, engine, proxy, client):
        arrived = asyncio.Event()

        async def script(exchange):
            await exchange.receive(b"one")
            arrived.set()
            await exchange.receive(b"two")
            await exchange.send({"text": "heard"})

        script.reads_body = False
        engine.script = script

        async def parts():
            yield b"one"
            await asyncio.wait_for(arrived.wait(), 60)  # the engine has it before there is a second part
            yield b"two"

        kind = {"content-type": "multipart/form-data; boundary=b"}
        response = await client.post("/v1/audio/transcriptions", content=parts(), headers=kind)
        assert response.json() == {"text": "heard"}
        assert engine.seen[0].headers["content-type"] == kind["content-type"]


class TestStreaming:
    async def test_each_chunk_arrives_before_the_next_is_made(self, engine, client):
        go = asyncio.Queue()

        async def script(exchange):
            await exchange.start()
            for n in range(3):
                await exchange.chunk(b"data: %d\n\n" % n)
                await go.get()
            await exchange.chunk(DONE)
            await exchange.end()

        engine.script = script
        async with client.stream("POST", CHAT, json=STREAM) as response:
            got = []
            async for chunk in response.aiter_raw():
                got.append(chunk)
                go.put_nowait(None)
        assert got == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", DONE]

    @pytest.mark.parametrize("pieces", [[b":\n\n"], [b": pi", b"ng\n", b"\n"]], ids=["whole", "in pieces"])
    async def test_a_comment_passes_and_is_no_first_token(self, engine, proxy, client, pieces):
        """Servers send them while they compute a long prompt."""
        go = asyncio.Event()

        async def script(exchange):
            await exchange.start()
            for piece in pieces:
                await exchange.chunk(piece)
                await asyncio.sleep(0.02)  # so that each is read alone
            await go.wait()
            await exchange.chunk(b"data: 0\n\n")
            await exchange.chunk(DONE)
            await exchange.end()

        engine.script = script
        (known,) = proxy.fleet.pools["m"].engines.values()
        async with client.stream("POST", CHAT, json=STREAM) as response:
            parts = response.aiter_raw()
            assert await anext(parts) == b"".join(pieces)
            (lease,) = known.leases
            assert not lease.has_answer
            assert not lease.begun.is_set()
            go.set()
            assert b"".join([part async for part in parts]) == b"data: 0\n\n" + DONE
        assert proxy.last.first_byte_s == lease.first_byte_s

    async def test_an_engine_that_dies_after_done_has_given_all(self, engine, proxy, client):
        engine.script = dies(event({"n": 1}), DONE, pause_s=0.02)
        response = await client.post(CHAT, json=STREAM)
        assert response.content == event({"n": 1}) + DONE
        assert (proxy.last.status, proxy.last.error) == (200, None)
        assert proxy.fleet.engines["a"].state == "ready"

    @pytest.fixture
    async def slow(self, engine, proxy):
        """A client that asked for 400 pieces of 64 KiB, and has read nothing yet."""

        async def script(exchange):
            await exchange.start()
            for engine.sent in range(1, 401):
                await exchange.chunk(b"x" * 65536)
            await exchange.end()

        engine.script, loop = script, asyncio.get_running_loop()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            slow.setblocking(False)
            await loop.sock_connect(slow, ("127.0.0.1", httpx.URL(proxy.url).port))
            await loop.sock_sendall(slow, post(CHAT, json.dumps(STREAM).encode()))
            await engine.request()
            yield slow

    @staticmethod
    async def read_all(slow):
        total, loop = 0, asyncio.get_running_loop()
        while total < 400 * 65536:
            total += len(await loop.sock_recv(slow, 1 << 20)) or pytest.fail(f"ended after {total} bytes")

    @pytest.fixture
    def reads_all_ahead(self, monkeypatch):
        monkeypatch.setattr(calls, "READ_AHEAD", 400 * 65536)

    async def test_a_slow_client_does_not_hold_an_engine_that_is_done(self, reads_all_ahead, proxy, slow):
        async with asyncio.timeout(60):
            while proxy.fleet.engines["a"].leases:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        await self.read_all(slow)

    async def test_a_slow_client_slows_the_engine(self, engine, slow):
        before = -1
        while engine.sent != before:
            before = engine.sent
            await asyncio.sleep(0.1)
        assert engine.sent < 250, "the engine's writes stall while the client does not read"
        await self.read_all(slow)
        assert engine.sent == 400


class TestReaders:
    """Somebody of the adapter's sees the answer pass, or makes it of the engine's stream."""

    @pytest.fixture
    def reader(self):
        return Reader()

    @pytest.fixture
    def adapters(self, engine, other, reader):
        return [HoldingAdapter(each, lambda body: Hold(body, answer=reader)) for each in (engine, other)]

    @pytest.fixture
    def proxy_options(self):
        return {"reuse": True}

    async def test_a_json_answer_is_shown_whole(self, reader, proxy, client):
        reader.assembles = True  # and needs no assembling: it is no stream
        response = await client.post(CHAT, json=ASK)
        assert response.json() == ANSWER
        assert (b"".join(reader.seen), reader.finished) == (response.content, 0)
        assert proxy.last.reported_tokens == 32

    @pytest.mark.parametrize("kind", ["text/event-stream", "application/octet-stream"])
    async def test_a_reader_gets_the_whole_events_that_have_its_marks(self, engine, reader, client, kind):
        events = [event({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in ("a", "b")]
        usage = event({"choices": [], "usage": {"completion_tokens": 2}})

        chunks = events[0], events[1][:20], events[1][20:], usage[:9], usage[9:], DONE
        engine.script = streams(*chunks, headers=[("content-type", kind)], pause_s=0.01)
        reader.marks = (b'"usage"',)
        response = await client.post(CHAT, json=STREAM)
        assert response.content == b"".join([*events, usage, DONE])
        assert reader.seen == [usage]

    @pytest.mark.parametrize("ms", [0.5, 50.0])
    async def test_a_reader_that_takes_long_ends_a_stream_in_a_thread(self, reader, client, ms):
        where, finish = [], reader.finish

        def noting(rest):
            where.append(threading.current_thread())
            return finish(rest)

        reader.finish, reader.finish_ms = noting, ms
        assert (await client.post(CHAT, json=STREAM)).status_code == 200
        assert [each is threading.main_thread() for each in where] == [ms < 1]

    async def test_a_reader_may_leave_out_some_of_an_answer_of_known_length(
        self, engine, reader, proxy, client
    ):
        engine.script = sends(ANSWER | {"more": 1})
        reader.feed = lambda chunk: chunk.replace(b', "more": 1', b"")
        assert (await client.post(CHAT, json=ASK)).json() == ANSWER

    async def test_a_reader_knows_what_a_json_answers_usage_does_not_tell(
        self, engine, reader, proxy, client
    ):
        engine.script = sends(ANSWER | {"usage": {"prompt_tokens": 40}})
        reader.cached = 8
        response = await client.post(CHAT, json=ASK)
        assert (response.headers["x-kvpin-cached-tokens"], proxy.last.reported_tokens) == ("8", 8)

    async def test_an_engine_that_dies_in_mid_stream_is_not_finished(self, engine, reader, client):
        engine.script = dies(b"data: 1\n\n")
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(CHAT, json=STREAM)
        assert (reader.seen, reader.finished) == ([b"data: 1\n\n"], 0)


class TestAssembling:
    """The engine is asked for a stream, its client wants one JSON answer."""

    WHOLE = b'{"assembled":true}'

    @pytest.fixture
    def readers(self):
        """The reader of each attempt, in order."""
        return []

    @pytest.fixture
    def answer(self):
        """What `finish` of the first attempt's reader gives."""
        return self.WHOLE

    @pytest.fixture
    def adapters(self, engine, other, readers, answer):
        def make(body):
            readers.append(Reader(assembles=True, cached=7, answer=self.WHOLE if readers else answer))
            return Hold(body.replace(stream=True), answer=readers[-1])

        return [HoldingAdapter(each, make) for each in (engine, other)]

    @pytest.fixture
    def proxy_options(self):
        return {"reuse": True}

    async def test_a_long_one_is_assembled_in_a_thread(self, engine, readers, proxy, client, monkeypatch):
        where = []

        def feed(reader, chunk):
            reader.finish_ms = 50.0
            return b""

        def finish(reader):
            where.append(threading.current_thread())
            return reader.answer

        monkeypatch.setattr(Reader, "feed", feed)
        monkeypatch.setattr(Reader, "finish", finish)
        response = await client.post(CHAT, json=ASK)
        assert response.content == self.WHOLE
        assert threading.main_thread() not in where
        assert where

    async def test_the_client_gets_one_json_answer(self, engine, readers, proxy, client):
        chunks = b"data: 1\n\n", b"data: 2\n\n", DONE
        engine.script = streams(*chunks, headers=[*EVENTS, ("cache-control", "no-store"), ("x-engine", "1")])
        response = await client.post(CHAT, json=ASK)
        assert engine.seen[0].json["stream"] is True
        assert response.content == self.WHOLE
        assert response.headers["content-type"] == "application/json"
        assert (response.headers["x-kvpin-cached-tokens"], response.headers["x-engine"]) == ("7", "1")
        assert "cache-control" not in response.headers
        assert (b"".join(readers[0].seen), readers[0].finished) == (b"".join(chunks), 1)
        assert (proxy.last.reported_tokens, proxy.last.stream, proxy.last.error) == (7, False, None)

    async def test_an_engine_that_dies_costs_the_client_nothing(self, engine, readers, proxy, client):
        engine.script = dies(b"data: half\n\n")
        response = await client.post(CHAT, json=ASK)
        assert (response.content, response.headers["x-kvpin-engine"]) == (self.WHOLE, "b")
        assert ([reader.finished for reader in readers], proxy.last.attempts) == ([0, 1], ["a", "b"])
        assert proxy.fleet.engines["a"].state == "suspect"

    @pytest.mark.parametrize("answer", [EngineUnavailable("it broke off")])
    async def test_a_stream_that_is_not_whole_is_asked_for_elsewhere(self, answer, proxy, client):
        response = await client.post(CHAT, json=ASK)
        assert (response.content, response.headers["x-kvpin-engine"]) == (self.WHOLE, "b")
        assert proxy.last.attempts == ["a", "b"]


class TestUsageOfEveryRoute:
    async def test_of_a_long_response(self, engine, proxy, client):
        response = {"output": ["x" * 50_000], "usage": {"input_tokens_details": {"cached_tokens": 7}}}
        last = event({"type": "response.completed", "response": response})
        engine.script = streams(event({"type": "response.created"}), last[:30_000], last[30_000:])
        await client.post("/v1/responses", json={"model": "m", "input": "x", "stream": True})
        assert proxy.last.reported_tokens == 7

    async def test_of_a_long_message(self, engine, proxy, client):
        start = {"type": "message_start", "message": {"usage": {"cache_read_input_tokens": 7}}}
        deltas = [event({"type": "content_block_delta", "delta": {"text": "x" * 900}})] * 50
        end = event({"type": "message_delta", "usage": {"output_tokens": 50}})
        engine.script = streams(event(start), *deltas, end)
        await client.post("/v1/messages", json={"model": "m", "messages": [], "stream": True})
        assert (proxy.last.reported_tokens, proxy.last.output_tokens) == (7, 50)


async def test_the_head_of_a_llama_servers_slots_is_no_failure(engine):
    async def slots(exchange):
        await exchange.send(b"", headers=[("content-type", "application/json")])

    engine.script = slots
    info = replace(INFO, routes=ROUTES)
    adapter = HoldingAdapter(engine, lambda body: Hold(body, answer=SlotsAnswer()), info=info)
    async with proxy_over(adapter) as proxy, client_of(proxy) as client:
        answer = await client.head("/slots")
        assert (answer.status_code, engine.seen[0].method) == (200, "HEAD")
        assert (proxy.last.error, proxy.fleet.engines["a"].state) == (None, "ready")


async def test_a_hold_that_is_lost_is_not_sent(engine):
    """The slot may hold another tenant's KV by now."""
    adapter = HoldingAdapter(engine, lambda body: Hold(body, is_lost=lambda: True))
    async with proxy_over(adapter, reuse=True) as proxy, client_of(proxy) as client:
        response = await client.post(CHAT, json=ASK)
    assert response.status_code == 502
    assert "lost before it could start" in response.text
    assert engine.seen == []
