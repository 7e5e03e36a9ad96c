import asyncio
import socket
from threading import Thread

import pytest

from engine_adapter.errors import EngineDied, EngineUnavailable
from engine_adapter.http.prepare import Headers, OutgoingRequest
from tests.fakes import FakeEngine


@pytest.fixture
async def engine():
    async with FakeEngine() as engine:
        yield engine


def request(engine, path="/x", method="POST", body=b"{}", **headers):
    return OutgoingRequest(method, engine.url + path, Headers.of(headers.items()).raw, body)


async def fetch(transport, outgoing):
    async with await transport.send(outgoing) as response:
        return await response.read()


class TestRequests:
    @pytest.mark.parametrize(
        "target",
        [
            "/v1/a%2Fb%20c",
            "/v1/%7Euser%41",
            "/v1/x?q=%41%2b+&r=a%20b&empty",
            "/v1/a;b=c,d",
            "/v1//x//",
            "/v1/x?a[]=[b]",
        ],
    )
    async def test_the_address_is_sent_as_it_stands(self, engine, transport, target):
        await fetch(transport, request(engine, target))
        assert engine.seen[0].target == target

    async def test_headers_are_those_given(self, engine, transport):
        await fetch(transport, request(engine, body=b'{"a":1}', **{"x-a": "1"}))
        seen = engine.seen[0]
        assert seen.headers == {"host": engine.url[7:], "x-a": "1", "content-length": "7"}
        assert seen.body == b'{"a":1}'

    async def test_a_streamed_body_goes_on_as_it_comes(self, engine, transport):
        first_is_there = asyncio.Event()

        async def script(exchange):
            await exchange.receive(b"one")
            first_is_there.set()
            await exchange.receive(b"0\r\n\r\n")
            await exchange.send({})

        script.reads_body = False
        engine.script = script

        async def body():
            yield b"one"
            await asyncio.wait_for(first_is_there.wait(), 5)
            yield b"two"

        await fetch(transport, request(engine, body=body()))

    @pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "during it"])
    async def test_an_error_of_the_body_comes_through_as_it_is(self, engine, transport, answered):
        class ClientsFault(Exception):
            pass

        fail = asyncio.Event()

        async def script(exchange):
            await exchange.receive(b"one")
            if answered:
                await exchange.start()
                await exchange.chunk(b"x")
            fail.set()
            await exchange.left.wait()

        script.reads_body = False
        engine.script = script

        async def body():
            yield b"one"
            await fail.wait()
            await asyncio.sleep(0.02)
            raise ClientsFault

        with pytest.raises(ClientsFault):
            await fetch(transport, request(engine, body=body()))
        await asyncio.wait_for(engine.seen[0].left.wait(), 5)

    async def test_cookies_and_redirects_are_left_alone(self, engine, transport):
        async def script(exchange):
            await exchange.send({}, status=307, headers=[("location", "/elsewhere"), ("set-cookie", "a=b")])

        engine.script = script
        for _ in range(2):
            async with await transport.send(request(engine)) as response:
                assert (response.status, response.headers["location"]) == (307, "/elsewhere")
        assert "cookie" not in engine.seen[1].headers


class TestAnswers:
    async def test_closing_early_is_seen_by_the_engine(self, engine, transport):
        async def script(exchange):
            await exchange.start()
            await exchange.chunk(b"x")
            await exchange.left.wait()

        engine.script = script
        async with await transport.send(request(engine)) as response:
            assert await response.receive() == b"x"
        await asyncio.wait_for(engine.seen[0].left.wait(), 5)

    async def test_so_is_giving_up_before_the_headers(self, engine, transport):
        async def script(exchange):
            await exchange.left.wait()

        engine.script = script
        task = asyncio.create_task(transport.send(request(engine)))
        exchange = await engine.request()
        task.cancel()
        await asyncio.wait_for(exchange.left.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_a_reader_that_waits_slows_the_engine(self, engine, transport):
        sent = 0

        async def script(exchange):
            nonlocal sent
            await exchange.start()
            while not exchange.left.is_set():
                await exchange.chunk(b"x" * 65536)
                sent += 1

        engine.script = script
        async with await transport.send(request(engine)):
            before = -1
            while sent != before:
                before = sent
                await asyncio.sleep(0.1)
        assert sent < 250


class TestConnections:
    @pytest.mark.parametrize("method", ["POST", "GET"])
    async def test_one_the_engine_closed_while_idle_is_not_used(self, transport, method):
        """The event loop has not seen the end of the connection when the next request is sent."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(5)
            connections = []

            def answer_once():
                connection, _ = listener.accept()
                connections.append(connection)
                while b"\r\n\r\n" not in connection.recv(4096):
                    pass
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

            url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            for _ in range(2):
                server = Thread(target=answer_once, daemon=True)
                server.start()
                assert await fetch(transport, OutgoingRequest(method, url)) == b"ok"
                server.join()
                connections[-1].close()
            assert len(connections) == 2


class TestFailures:
    @pytest.mark.parametrize("abort", [False, True], ids=["closed", "reset"])
    @pytest.mark.parametrize("headers", [[], [("content-length", "100")]], ids=["chunked", "length"])
    async def test_death_in_mid_answer(self, engine, transport, abort, headers):
        async def script(exchange):
            await exchange.start(headers=headers)
            await exchange.chunk(b"some")
            await asyncio.sleep(0.02)
            exchange.die(abort=abort)

        engine.script = script
        async with await transport.send(request(engine)) as response:
            with pytest.raises(EngineDied, match="mid-answer"):
                await response.read()
        async with await transport.send(request(engine)) as response:
            got = []
            with pytest.raises(EngineUnavailable, match="mid-answer"):  # noqa: PT012 - the loop breaks
                while chunk := await response.receive():
                    got += [chunk]
            assert got == [b"some"]
