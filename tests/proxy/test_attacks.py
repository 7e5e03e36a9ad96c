"""Attacks of clients and engines, over sockets. docs/threat-model.md lists all, and where each is tested."""

import contextlib
import json
from dataclasses import replace

import httpx
import pytest
from structlog.testing import capture_logs

from engine_adapter import HttpTransport
from engine_adapter.http import connection, sse
from engine_adapter.types import MESSAGES_ROUTES
from proxy.core.life import Cause
from proxy.request.tenants import ApiKey, Tenants
from proxy.server.app import Proxy, build_app
from proxy.settings import Settings
from tests.fakes import ANSWER, ASK, CHAT, STREAM, answer, asked, connect_to, event, post, serving
from tests.scripts import sends

SECRET = "s3cret-of-the-engine"
TWO = Tenants([ApiKey.of("k1", "alice"), ApiKey.of("k2", "bob")])
ALICE = {"authorization": "Bearer k1"}


class TestClients:
    async def test_refused_requests_are_counted(self):
        async with asked(answer, tenants=TWO, max_body_bytes=1000) as (proxy, client, _):
            await client.post(CHAT, json=ASK)
            await client.post(CHAT, content=b"{", headers=ALICE)
            await client.post(CHAT, content=bytes(2000), headers=ALICE)
            await client.post(CHAT, json=ASK | {"model": "other"}, headers=ALICE)
            await client.post(CHAT, json=ASK, headers=ALICE)
            page = (await client.get("/metrics")).text
            assert len(list(proxy.requests)) == 3  # of the whole bodies, and of the one that is no JSON
        counted = {
            line.partition('status="')[2][:3]: line.rpartition(" ")[2]
            for line in page.splitlines()
            if line.startswith("kvpin_requests_total{")
        }
        assert counted == {"401": "1.0", "400": "1.0", "413": "1.0", "404": "1.0", "200": "1.0"}

    async def test_ids_and_headers_of_the_engines_own_do_not_reach_it(self):
        async with asked(answer, tenants=TWO) as (_proxy, client, engine):
            headers = ALICE | {"x-request-id": "r", "x-data-parallel-rank": "1"}
            response = await client.post(CHAT, json=ASK | {"rid": "r", "request_id": "r"}, headers=headers)
            assert response.headers["x-request-id"] == "r"
            seen = engine.seen[0]
            assert not {"rid", "request_id"} & set(seen.json)
            assert not {"x-request-id", "x-data-parallel-rank", "authorization"} & set(seen.headers)
            refused = await client.post(CHAT, json=ASK | {"kv_transfer_params": {}}, headers=ALICE)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")

    async def test_a_key_in_a_trailer_is_none(self):
        body = json.dumps(ASK).encode()
        head = post(CHAT, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        chunks = b"%x\r\n%b\r\n0\r\nauthorization: Bearer k1\r\n\r\n" % (len(body), body)
        async with asked(answer, tenants=TWO) as (proxy, _, engine):
            reader, writer = await connect_to(proxy)
            writer.write(head + chunks)
            assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
            writer.close()
            assert not engine.seen

    @pytest.mark.parametrize(
        "message",
        [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9000}}]},
            {"role": "user", "content": "\ud800"},
            [[[[[[[]]]]]]],
        ],
        ids=["arguments without end", "half a character", "lists"],
    )
    async def test_odd_messages_are_no_500(self, message):
        async with asked(answer, reuse=True) as (_, client, _):
            body = json.dumps({"model": "m", "messages": [message]})
            assert (await client.post(CHAT, content=body)).status_code in (200, 400)

    async def test_no_redirection_leads_to_a_host_that_the_client_names(self):
        real = Proxy(Settings(), HttpTransport())
        async with serving(build_app(real)) as url, httpx.AsyncClient(base_url=url) as client:
            for path in ("/v1", "/health/", "/metrics/", "/admin/v1/engines/"):
                answer = await client.get(path, headers={"host": "evil.example"})
                assert "location" not in answer.headers
        await real.transport.aclose()


class TestEngines:
    @pytest.mark.parametrize(
        "raw",
        [
            f"{SECRET}\r\n\r\n",
            f"HTTP/1.1 {SECRET}\r\n\r\n",
            f"HTTP/1.1 200 OK\r\n{SECRET}\r\n\r\n",
            f"HTTP/1.1 200 OK\r\ncontent-length: {SECRET}\r\n\r\n",
            f"HTTP/1.1 200 OK\r\nx: {SECRET}\0\r\n\r\n",
            f"HTTP/1.1 099 {SECRET}\r\n\r\n",
            f"HTTP/1.1 600 {SECRET}\r\n\r\n",
            f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{SECRET}\r\n",
            f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{SECRET}",
        ],
    )
    async def test_the_text_of_a_broken_answer_is_nowhere(self, raw):
        async def script(exchange):
            await exchange._connection.write(raw.encode())
            exchange.die()

        async with asked(script) as (_, client, _):
            with capture_logs() as logs:
                answer = await client.post(CHAT, json=ASK)
        assert answer.status_code == 502
        assert SECRET not in answer.text
        assert SECRET not in repr(logs)

    async def test_the_text_of_an_error_reaches_its_client_alone(self):
        """An engine may repeat the prompt in it, at any length."""
        text = f"{SECRET} " * (1 << 16)

        script = sends({"error": {"message": text, "type": "server_error"}}, 500)
        async with asked(script) as (_, client, _):
            with capture_logs() as logs:
                for _ in range(6):  # until the engine is known to fail
                    answer = await client.post(CHAT, json=ASK)
        assert answer.status_code == 500
        told = answer.json()["error"]["message"]
        assert (told[:1000], told[-1000:]) == (text[:1000], text[-1000:])  # the middle is cut out
        assert {line["event"] for line in logs} >= {"the engine refused a request"}
        assert any(line["event"].startswith("requests keep failing") for line in logs)
        assert {line["error"] for line in logs} == {"the engine answered 500"}

    @pytest.mark.parametrize(
        ("path", "more"), [(CHAT, {"temperature": 0}), ("/v1/messages", {"max_tokens": 9})]
    )
    async def test_an_endless_event_is_given_up(self, path, more, monkeypatch):
        """Where events are collected: for another engine that may go on, and to translate them."""
        monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1 << 20)

        async def script(exchange):
            await exchange.start()
            await exchange.chunk(event({"choices": [{"index": 0, "delta": {"content": "a"}}]}))
            await exchange.chunk(b"data: {")
            with contextlib.suppress(OSError):
                for _ in range(64):
                    await exchange.chunk(b" " * 65_536)

        async with asked(script, script) as (proxy, client, *_):
            for engine in proxy.fleet.engines.values():
                engine.info = replace(engine.info, served_as_chats=MESSAGES_ROUTES)
            with contextlib.suppress(httpx.RemoteProtocolError):  # kvpin breaks it off
                await client.post(path, json=STREAM | more)
            await proxy.settled()
            assert proxy.last.cause is Cause.ENGINE_GARBLED
            assert "an event of the engine's stream is longer than 1 MiB" in proxy.last.error

    async def test_an_endless_answer_is_given_up(self, monkeypatch):
        monkeypatch.setattr(connection, "MAX_WHOLE_BYTES", 1 << 20)

        async def script(exchange):
            await exchange.start(headers=[("content-type", "application/json")])
            while True:
                await exchange.chunk(bytes(65_536))

        async with asked(script) as (_, client, _):
            answer = await client.post(CHAT, json=ASK)
        assert answer.status_code == 502

    async def test_a_compressed_answer_is_not_unpacked(self):
        packed = [("content-type", "application/json"), ("content-encoding", "gzip")]
        async with asked(sends(b"\x1f\x8b not unpacked", headers=packed)) as (_, client, engine):
            request = client.build_request("POST", CHAT, json=ASK)
            answer = await client.send(request, stream=True)
            assert b"".join([part async for part in answer.aiter_raw()]) == b"\x1f\x8b not unpacked"
            assert engine.seen[0].headers["accept-encoding"] == "identity"

    @pytest.mark.parametrize("cached", [-1, -(2**63), 2**70, 1e300, "x", [], {"a": 1}])
    async def test_odd_counts_of_tokens_are_no_500(self, cached):
        usage = {"prompt_tokens": cached, "prompt_tokens_details": {"cached_tokens": cached}}

        script = sends({**ANSWER, "usage": usage})
        async with asked(script, reuse=True) as (_, client, _):
            assert (await client.post(CHAT, json=ASK)).status_code == 200
            assert (await client.get("/metrics")).status_code == 200

    async def test_bytes_behind_an_answer_are_no_answer_to_the_next(self):
        async def script(exchange):
            forged = b'{"id":"forged"}'
            await exchange.send(ANSWER)
            behind = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            await exchange._connection.write(behind % (len(forged), forged))

        async with asked(script) as (_, client, engine):
            for _ in range(5):
                answer = await client.post(CHAT, json=ASK)
                assert "forged" not in answer.text
        assert len(engine.connections) == 5
