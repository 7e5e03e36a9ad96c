"""What is asked twice, what is never sent, and how all ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from threading import Thread

import pytest
import uvloop

from engine_adapter.errors import (
    EngineDied,
    EngineLost,
    EngineUnavailable,
    EngineUnhealthy,
    EngineUnreachable,
)
from engine_adapter.http import client
from engine_adapter.http.client import HttpTransport
from engine_adapter.http.prepare import Headers, OutgoingRequest
from tests.engine_adapter.http.raw_engine import Wire, raw_engine
from tests.fakes import FakeEngine

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def fetch(transport, asked):
    """The answer's content; of an address alone, it is asked by GET."""
    asked = OutgoingRequest("GET", asked) if isinstance(asked, str) else asked
    async with await transport.send(asked) as response:
        return await response.read()


async def always(wire):
    while await wire.head():
        await wire.write(OK)


async def once(wire):
    """Answers one request, reads the second, and closes."""
    await wire.head()
    await wire.write(OK)
    await wire.head()


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_a_request_that_changes_nothing_is_sent_again_on_a_new_connection(transport, method):
    async with raw_engine(once) as (url, wires):
        await fetch(transport, OutgoingRequest("OPTIONS", url))
        await fetch(transport, OutgoingRequest(method, url))
        assert [wire.seen.count(method.encode()) for wire in wires[-2:]] == [1 + (method == "OPTIONS"), 1]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_any_other_is_not(transport, method):
    async with raw_engine(once) as (url, wires):
        await fetch(transport, OutgoingRequest("POST", url))
        with pytest.raises(EngineDied, match="gave no answer"):
            await fetch(transport, OutgoingRequest(method, url))
        assert len(wires) == 1


async def test_what_failed_on_a_new_connection_is_not_sent_again(transport):
    async with raw_engine(Wire.head) as (url, wires):
        with pytest.raises(EngineUnavailable):
            await fetch(transport, url)
        assert len(wires) == 1


@pytest.mark.parametrize("target", ["/a b", "/a\r\nx: y", "/a\n", "/\0"])
async def test_a_target_that_would_end_its_line_is_never_sent(transport, target):
    with pytest.raises(ValueError, match="percent-encoded"):
        await transport.send(OutgoingRequest("GET", "http://127.0.0.1:1" + target))


async def test_closing_ends_idle_connections_and_running_answers(transport):
    async def serve(wire):
        await wire.head()
        await wire.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nsome")
        await wire.left()

    async with raw_engine(serve) as (url, wires), asyncio.timeout(5):
        response = await transport.send(OutgoingRequest("GET", url))
        assert await response.receive() == b"some"
        await transport.aclose()
        await wires[0].is_left.wait()
        with pytest.raises(EngineDied, match="removed"):
            await response.receive()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_closing_ends_who_waits_for_an_answer_and_no_new_connection_is_made_for_it(transport, method):
    asked = asyncio.Event()

    async def serve(wire):
        await wire.head()
        await wire.write(OK)
        await wire.head()
        asked.set()
        await wire.left()

    async with raw_engine(serve) as (url, wires), asyncio.timeout(5):
        await fetch(transport, url)
        waiting = asyncio.create_task(fetch(transport, OutgoingRequest(method, url)))
        await asked.wait()
        await transport.aclose()
        with pytest.raises(EngineUnavailable, match="removed"):
            await waiting
        assert len(wires) == 1


async def test_after_hanging_up_on_a_socket_all_that_was_asked_there_fails_and_what_is_asked_later_does_not(
    transport, tmp_path
):
    path, connected, closed = tmp_path / "s", asyncio.Queue(), asyncio.Queue()

    async def hang(reader, writer):
        connected.put_nowait(None)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        closed.put_nowait(None)

    def send():
        return asyncio.create_task(transport.send(OutgoingRequest("POST", "http://x/", unix=str(path))))

    async with await asyncio.start_unix_server(hang, path), asyncio.timeout(5):
        asked = send()
        await connected.get()
        connecting = send()
        await asyncio.sleep(0)
        transport.hang_up(str(path), "it is lost")
        for each, error in ((asked, EngineDied), (connecting, EngineUnreachable)):
            with pytest.raises(error, match="it is lost"):
                await each
        later = send()
        for _ in range(2):
            await connected.get()
        assert not later.done()
        later.cancel()
        for _ in range(3):
            await closed.get()
        await asyncio.sleep(0)  # the event loop closes sockets in its next cycle


async def test_an_address_that_nothing_is_asked_at_any_more_is_forgotten(transport, monkeypatch):
    async with raw_engine(always) as (url, _), raw_engine(always) as (other, _):
        await fetch(transport, url)
        monkeypatch.setattr(client, "UNUSED_S", 0.0)
        with pytest.raises(EngineUnavailable):  # an engine of which no connection is open
            await fetch(transport, "http://127.0.0.1:1/")
        await asyncio.sleep(0.01)
        await fetch(transport, other)
        kept = {address for address, _, _ in transport._origins}
        assert kept == {url.rstrip("/"), other.rstrip("/")}


async def test_an_idle_connection_that_the_engine_closes_is_told_and_one_that_kvpin_closes_is_not():
    told = []
    transport = HttpTransport(closed=lambda: told.append(1))

    async def twice(wire):
        for _ in range(2):
            await wire.head()
            await wire.write(OK)

    async with raw_engine(twice) as (url, _):
        await fetch(transport, url)
        assert told == []
        await fetch(transport, url)  # then the engine closes
        async with asyncio.timeout(5):
            while not told:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    async with raw_engine(once) as (url, _):
        await fetch(transport, url)
        await transport.aclose()
    assert told == [1]


async def test_nothing_is_sent_on_a_new_connection_before_it_is_confirmed(transport):
    asked = []

    async def confirm():
        asked.append(1)
        if len(asked) == 1:
            raise EngineLost("another process")

    async with raw_engine(always) as (url, wires):
        with pytest.raises(EngineLost):
            await transport.send(OutgoingRequest("POST", url), confirm)
        for _ in range(2):  # the second one goes over the connection of the first
            async with await transport.send(OutgoingRequest("POST", url), confirm) as response:
                await response.read()
        assert len(asked) == 2
        assert [wire.seen.count(b"POST") for wire in wires] == [0, 2]


@pytest.fixture
async def engine():
    async with FakeEngine() as engine:
        yield engine


def request(engine, path="/x", method="POST", body=b"{}", **headers):
    return OutgoingRequest(method, engine.url + path, Headers.of(headers.items()).raw, body)


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
        headers = [("location", "/elsewhere"), ("set-cookie", "a=b")]
        engine.script = lambda exchange: exchange.send({}, status=307, headers=headers)
        for _ in range(2):
            async with await transport.send(request(engine)) as response:
                assert (response.status, response.headers["location"]) == (307, "/elsewhere")
        assert "cookie" not in engine.seen[1].headers


class TestAnswers:
    async def test_giving_up_before_the_headers_is_seen_by_the_engine(self, engine, transport):
        engine.script = lambda exchange: exchange.left.wait()
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
    async def test_death_in_mid_answer_comes_after_what_was_read(self, engine, transport, abort, headers):
        async def script(exchange):
            await exchange.start(headers=headers)
            await exchange.chunk(b"some")
            await read.wait()
            exchange.die(abort=abort)

        engine.script, read = script, asyncio.Event()
        async with await transport.send(request(engine)) as response:
            assert await response.receive() == b"some"
            read.set()
            with pytest.raises(EngineDied, match="mid-answer"):
                await response.receive()


# An address of this machine where nobody listens.
DEAF = "127.0.0.9"


class Names:
    """The event loop's resolver and connector: which names were looked up, which addresses tried."""

    def __init__(self, monkeypatch) -> None:
        loop = asyncio.get_running_loop()
        self.asked, self.tried = [], []
        self.addresses = [DEAF, "127.0.0.1", "127.0.0.1"]
        self._create = loop.create_connection
        monkeypatch.setattr(loop, "getaddrinfo", self._look_up, raising=False)
        monkeypatch.setattr(loop, "create_connection", self._connect, raising=False)

    async def _look_up(self, host, port, **_):
        self.asked.append(host)
        if not self.addresses:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in self.addresses]

    async def _connect(self, factory, host, port, **options):
        self.tried.append(host)
        return await self._create(factory, host, port, **options)


async def says_close(wire):
    await wire.head()
    await wire.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


async def test_every_address_of_a_name_is_tried_and_the_good_one_is_remembered(transport, monkeypatch):
    async with raw_engine(says_close) as (url, wires):
        names = Names(monkeypatch)
        named = url.replace("127.0.0.1", "engine.internal")
        for _ in range(2):
            await fetch(transport, named)
        assert names.tried == [DEAF, "127.0.0.1", "127.0.0.1"]
        assert names.asked == ["engine.internal"], "looked up once, for a while"
        assert b"host: engine.internal:" in wires[0].seen


async def test_a_name_is_looked_up_again_after_a_while_or_when_it_leads_nowhere(transport, monkeypatch):
    async with raw_engine(says_close) as (url, _):
        names = Names(monkeypatch)
        named = url.replace("127.0.0.1", "engine.internal")
        names.addresses = [DEAF]
        with pytest.raises(EngineUnreachable, match=r"cannot connect to engine\.internal:\d+: "):
            await fetch(transport, named)
        monkeypatch.setattr(client, "DNS_S", 0.0)
        names.addresses = ["127.0.0.1"]
        for _ in range(2):
            await fetch(transport, named)
        assert len(names.asked) == 3
        names.addresses = []
        with pytest.raises(EngineUnavailable, match="Name or service not known"):
            await fetch(transport, named)


async def test_an_address_is_never_looked_up(transport, monkeypatch):
    async with raw_engine(says_close) as (url, _):
        names = Names(monkeypatch)
        await fetch(transport, url)
        assert not names.asked


async def test_a_connection_that_takes_too_long():
    async with raw_engine(Wire.left) as (url, _):
        address = url.replace("http:", "https:").rstrip("/")
        with pytest.raises(EngineUnhealthy, match=r"no answer within 0\.05 s$"):
            await client.Origin(address, None, 0.05).connect()
        transport = HttpTransport(connect_timeout_s=0.05, setting="timeouts.connect_s")
        with pytest.raises(EngineUnhealthy, match=r"no answer within 0\.05 s \(timeouts\.connect_s\)$"):
            await fetch(transport, f"{address}/")
        await transport.aclose()


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://h:80", b"h"),
        ("http://h:8000", b"h:8000"),
        ("http://[::1]:8000", b"[::1]:8000"),
        ("http://bücher.example", b"xn--bcher-kva.example"),
    ],
)
def test_the_host_header(url, host):
    assert client.Origin(url, None, 1.0).host == host


def test_callers_that_leave_while_it_connects_do_not_keep_it_from_closing():
    async def leave_at_each_step():
        async with raw_engine(Wire.left) as (url, _):
            engine = client.Origin(url, None, 2)
            for steps in range(40):
                caller = asyncio.create_task(engine.connect())
                for _ in range(steps % 10):
                    await asyncio.sleep(0)
                caller.cancel()
                await asyncio.wait([caller])
            async with asyncio.timeout(10):
                await engine.aclose()

    uvloop.run(leave_at_each_step())
