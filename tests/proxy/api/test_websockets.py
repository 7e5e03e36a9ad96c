"""WebSockets through kvpin, over real sockets: a real server as the engine, a real client."""

import asyncio
import contextlib
import socket
from dataclasses import replace

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus

from engine_adapter.openai_compatible import ROUTES
from proxy.core.life import Cause, Rules
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import INFO, FakeAdapter, FakeEngine, connect_to, proxy_over

REALTIME = "/v1/realtime?model=m"
SOCKETS = replace(INFO, routes=ROUTES)


class SocketEngine:
    """An engine that echoes what it gets on a WebSocket."""

    def __init__(self, **options):
        self.options = {"max_size": None, "close_timeout": 1, "ping_interval": None, **options}
        self.requests = []
        self.closed = asyncio.Queue()
        self.talk = self.echo

    async def echo(self, connection):
        async for message in connection:
            await connection.send(message)

    async def _handle(self, connection):
        self.requests.append(connection.request)
        try:
            await self.talk(connection)
        finally:
            await connection.wait_closed()
            self.closed.put_nowait((connection.close_code, connection.close_reason))

    @contextlib.asynccontextmanager
    async def adapter(self, engine_id="a", info=SOCKETS, **spec):
        async with serve(self._handle, "127.0.0.1", 0, **self.options) as server:
            port = server.sockets[0].getsockname()[1]
            yield FakeAdapter(engine_id, f"http://127.0.0.1:{port}", info, **spec)


@contextlib.asynccontextmanager
async def kvpin(engine, *, spec=None, **options):
    async with engine.adapter(**(spec or {})) as adapter, proxy_over(adapter, **options) as proxy:
        yield proxy
        await proxy.settled()


def over(proxy, path=REALTIME, **options):
    settings = {"max_size": None, "proxy": None, "ping_interval": None, "close_timeout": 1, **options}
    return connect(proxy.url.replace("http", "ws", 1) + path, **settings)


async def refusal(proxy, path=REALTIME, **options):
    """Status and OpenAI's error of a handshake that fails."""
    with pytest.raises(InvalidStatus) as failed:
        async with over(proxy, path, **options):
            pass
    response = failed.value.response
    assert b'"error":{"message":' in response.body
    return response.status_code, response.body.decode()


class TestPassingOn:
    @pytest.mark.parametrize("compression", ["deflate", None])
    @pytest.mark.parametrize("path", [REALTIME, "/v1/responses"])
    async def test_messages_pass_both_ways(self, path, compression):
        engine = SocketEngine()
        async with kvpin(engine) as proxy, over(proxy, path, compression=compression) as client:
            for message in ("hello", b"\x00\xff" * 3, "", "x" * 300_000, ["one ", "two"]):
                await client.send(message)
                assert await client.recv() == ("one two" if isinstance(message, list) else message)
            await (await client.ping())
            assert bool(client.protocol.extensions) is (compression is not None)
        assert await engine.closed.get() == (1000, "")
        assert engine.requests[0].path == path
        record = proxy.last
        assert (record.status, record.stream, record.error) == (101, True, None)
        assert record.route == path.partition("?")[0]

    async def test_a_slow_reader_slows_the_other_side_down(self):
        engine, go, chunk = SocketEngine(), asyncio.Event(), b"x" * 262_144

        async def send(connection, sent):
            for _ in range(200):
                await connection.send(chunk)
                sent.append(1)

        async def held_up(sent):
            """How many were sent until the sender waits."""
            seen = -1
            while len(sent) != seen:
                seen = len(sent)
                await asyncio.sleep(0.1)
            return seen

        async def flood(connection):
            await send(connection, of_engine)
            await go.wait()
            assert [await connection.recv() for _ in range(200)] == [chunk] * 200
            await connection.send("got all")

        engine.talk, of_engine, of_client = flood, [], []
        async with kvpin(engine) as proxy, over(proxy, compression=None, max_queue=1) as client:
            assert await held_up(of_engine) < 200
            assert [await client.recv() for _ in range(200)] == [chunk] * 200
            sending = asyncio.create_task(send(client, of_client))
            assert await held_up(of_client) < 200
            go.set()
            await sending
            assert await client.recv() == "got all"

    async def test_the_last_words_of_a_client_that_leaves_arrive(self):
        engine, got = SocketEngine(), []

        async def listen(connection):
            with contextlib.suppress(ConnectionClosed):
                while True:
                    got.append(await connection.recv())

        engine.talk = listen
        async with kvpin(engine) as proxy, over(proxy) as client:
            for n in range(100):
                await client.send(str(n))
            client.transport.close()
        assert (await engine.closed.get())[0] == 1006
        assert got == [str(n) for n in range(100)]
        assert proxy.last.status == 101

    async def test_an_engine_that_dies_breaks_it_off(self):
        engine = SocketEngine()

        async def die(connection):
            await connection.recv()
            connection.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )
            connection.transport.abort()

        engine.talk = die
        async with kvpin(engine) as proxy, over(proxy) as client:
            await client.send("die")
            with pytest.raises(ConnectionClosedError):
                await client.recv()
            assert client.close_code == 1006

    async def test_the_total_limit_ends_both_sides(self):
        engine = SocketEngine()
        async with kvpin(engine, rules=Rules(total_s=0.2)) as proxy, over(proxy) as client:
            with pytest.raises(ConnectionClosedError):
                await client.recv()
            assert (await engine.closed.get())[0] == 1006
        assert (proxy.last.cause, proxy.last.status) == (Cause.OUR_LIMIT, 101)

    async def test_frames_right_behind_the_handshake_are_not_lost(self):
        engine = SocketEngine()
        async with kvpin(engine) as proxy:
            reader, writer = await connect_to(proxy)
            head = b"GET /v1/realtime HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: keep-alive, Upgrade\r\n"
            upgrade = b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
            key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            writer.write(head + upgrade + key + b"\x81\x82\x00\x00\x00\x00hi")
            answer = await asyncio.wait_for(reader.readuntil(b"\x81\x02hi"), 5)
            assert answer.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
            assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in answer  # of RFC 6455, for that key
            writer.close()


class TestKeys:
    KEYS = Tenants([ApiKey.of("k1", "t1")])

    async def test_kvpins_key_stays_here_and_the_engines_is_added(self):
        engine = SocketEngine()
        async with kvpin(engine, tenants=self.KEYS, spec={"api_key": "engine-key"}) as proxy:
            assert (await refusal(proxy))[0] == 401
            async with over(proxy, additional_headers={"authorization": "Bearer k1"}) as client:
                await client.send("hi")
                assert await client.recv() == "hi"
        assert engine.requests[0].headers.get_all("authorization") == ["Bearer engine-key"]
        assert proxy.last.tenant == "t1"

    async def test_a_browsers_key_among_the_subprotocols(self):
        engine, offer = SocketEngine(), ["realtime", "openai-insecure-api-key.k1", "openai-beta.realtime-v1"]
        async with kvpin(engine, tenants=self.KEYS) as proxy:
            async with over(proxy, subprotocols=offer) as client:
                assert client.subprotocol == "realtime"  # the engine chose none
            offer[1] = "openai-insecure-api-key.wrong"
            assert (await refusal(proxy, subprotocols=offer))[0] == 401
        headers = engine.requests[0].headers
        assert headers["sec-websocket-protocol"] == "realtime, openai-beta.realtime-v1"
        assert "authorization" not in headers

    async def test_without_kvpin_keys_it_is_the_engines(self):
        engine = SocketEngine(subprotocols=["b"])
        offer = ["a", "b", "openai-insecure-api-key.theirs"]
        async with kvpin(engine) as proxy, over(proxy, subprotocols=offer) as client:
            assert client.subprotocol == "b"
        assert engine.requests[0].headers["authorization"] == "Bearer theirs"

    async def test_a_page_of_another_origin(self):
        engine = SocketEngine()
        async with kvpin(engine, cors_origins=("https://a.example",)) as proxy:
            assert (await refusal(proxy, origin="https://b.example"))[0] == 403
            async with over(proxy, origin="https://a.example"):
                pass
        assert len(engine.requests) == 1

    async def test_several_tenants_have_none(self):
        engine = SocketEngine()
        tenants = Tenants([ApiKey.of("k1", "t1"), ApiKey.of("k2", "t2")])
        async with kvpin(engine, tenants=tenants) as proxy:
            status, body = await refusal(proxy, additional_headers={"authorization": "Bearer k1"})
        assert (status, "several tenants" in body, engine.requests) == (403, True, [])


class TestModels:
    async def test_the_query_names_the_model(self):
        one, two = SocketEngine(), SocketEngine()
        async with (
            one.adapter("a") as first,
            two.adapter("b", replace(SOCKETS, model="own"), model="n") as second,
            proxy_over(first, second, aliases={"gpt-realtime": "m"}) as proxy,
        ):
            async with (
                over(proxy, "/v1/realtime?model=gpt-realtime&call_id="),
                over(proxy, "/v1/realtime?model=n"),
            ):
                loads = [engine.ledger.in_flight for engine in proxy.fleet.engines.values()]
                assert loads == [1, 1]  # as long as they are open
            assert (await refusal(proxy, "/v1/realtime?model=other"))[0] == 404
            assert (await refusal(proxy, "/v1/realtime"))[0] == 404
            await proxy.settled()
        assert [request.path for request in one.requests] == ["/v1/realtime?model=m&call_id="]
        assert [request.path for request in two.requests] == ["/v1/realtime?model=own"]


class TestRefusals:
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/realtime/sessions"])
    async def test_a_path_without_websockets(self, path):
        async with kvpin(SocketEngine()) as proxy:
            assert (await refusal(proxy, path))[0] == 404

    async def test_an_engine_that_declares_none_is_not_asked(self):
        engine = SocketEngine()
        async with kvpin(engine, spec={"info": INFO}) as proxy:
            status, body = await refusal(proxy)
        assert (status, "has the route WebSocket /v1/realtime" in body, engine.requests) == (404, True, [])

    @pytest.mark.parametrize(("says", "status"), [(403, 403), (404, 404), (426, 404), (200, 404), (401, 401)])
    async def test_an_engine_that_takes_none(self, says, status):
        async def refuse(exchange):
            await exchange.send({"error": {"message": "no"}} if says != 200 else {}, status=says)

        async with FakeEngine("a", refuse) as engine:
            adapter = FakeAdapter("a", engine.url, SOCKETS)
            async with proxy_over(adapter, wait_s=0.1) as proxy:
                assert (await refusal(proxy))[0] == status
                await proxy.settled()
