"""What is asked twice, what is never sent, and how all ends."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from engine_adapter.errors import EngineDied, EngineLost, EngineUnavailable, EngineUnreachable
from engine_adapter.http import client
from engine_adapter.http.client import HttpTransport
from engine_adapter.http.prepare import OutgoingRequest
from tests.engine_adapter.http.raw_engine import raw_engine

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def fetch(transport, url, method):
    async with await transport.send(OutgoingRequest(method, url)) as response:
        return await response.read()


async def once(wire):
    """Answers one request, reads the second, and closes."""
    await wire.head()
    await wire.write(OK)
    await wire.head()


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_a_request_that_changes_nothing_is_sent_again_on_a_new_connection(transport, method):
    async with raw_engine(once) as (url, wires):
        await fetch(transport, url, "OPTIONS")
        await fetch(transport, url, method)
        assert [wire.seen.count(method.encode()) for wire in wires[-2:]] == [1 + (method == "OPTIONS"), 1]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_any_other_is_not(transport, method):
    async with raw_engine(once) as (url, wires):
        await fetch(transport, url, "POST")
        with pytest.raises(EngineDied, match="gave no answer"):
            await fetch(transport, url, method)
        assert len(wires) == 1


async def test_what_failed_on_a_new_connection_is_not_sent_again(transport):
    async def serve(wire):
        await wire.head()

    async with raw_engine(serve) as (url, wires):
        with pytest.raises(EngineUnavailable):
            await fetch(transport, url, "GET")
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

    async with raw_engine(serve) as (url, wires):
        response = await transport.send(OutgoingRequest("GET", url))
        assert await response.receive() == b"some"
        await transport.aclose()
        await asyncio.wait_for(wires[0].is_left.wait(), 5)


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
    async def serve(wire):
        while await wire.head():
            await wire.write(OK)

    async with raw_engine(serve) as (url, _), raw_engine(serve) as (other, _):
        await fetch(transport, url, "GET")
        monkeypatch.setattr(client, "UNUSED_S", 0.0)
        with pytest.raises(EngineUnavailable):  # an engine of which no connection is open
            await fetch(transport, "http://127.0.0.1:1/", "GET")
        await asyncio.sleep(0.01)
        await fetch(transport, other, "GET")
        kept = {address for address, _, _ in transport._origins}
        assert kept == {url.rstrip("/"), other.rstrip("/")}


async def test_an_idle_connection_that_the_engine_closes_is_told_and_one_that_kvpin_closes_is_not():
    told = []
    transport = HttpTransport(closed=lambda: told.append(1))

    async def serve(wire):
        await wire.head()
        await wire.write(OK)
        await wire.head()
        await wire.write(OK)

    async with raw_engine(serve) as (url, _):
        await fetch(transport, url, "GET")
        assert told == []
        await fetch(transport, url, "GET")  # then the engine closes
        async with asyncio.timeout(5):
            while not told:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    async with raw_engine(once) as (url, _):
        await fetch(transport, url, "GET")
        await transport.aclose()
    assert told == [1]


async def test_nothing_is_sent_on_a_new_connection_before_it_is_confirmed(transport):
    asked = []

    async def confirm():
        asked.append(1)
        if len(asked) == 1:
            raise EngineLost("another process")

    async def serve(wire):
        while await wire.head():
            await wire.write(OK)

    async with raw_engine(serve) as (url, wires):
        with pytest.raises(EngineLost):
            await transport.send(OutgoingRequest("POST", url), confirm)
        for _ in range(2):  # the second one goes over the connection of the first
            async with await transport.send(OutgoingRequest("POST", url), confirm) as response:
                await response.read()
        assert len(asked) == 2
        assert [wire.seen.count(b"POST") for wire in wires] == [0, 2]
