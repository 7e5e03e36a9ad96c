"""Requests passed on to a kvpin that hangs."""

import asyncio
from types import SimpleNamespace

import pytest

from engine_adapter import Headers, HttpTransport
from proxy.api.relay import pass_on
from proxy.errors import TimeLimit
from proxy.request.calls import Call, Nobody, Reply

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b"9\r\ndata: {}\n\r\n"


class Client(Nobody):
    def __init__(self):
        self.got, self.headers = b"", []

    def start(self, status, headers):
        self.headers = headers

    def write(self, chunk):
        self.got += chunk


@pytest.fixture
async def asked(tmp_path):
    """Passes a request on to a server that sends these pieces, and then nothing."""
    transport, socket = HttpTransport(), str(tmp_path / "socket")
    client = Client()

    async def ask(*pieces):
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            for each in pieces:
                writer.write(each)
                await asyncio.sleep(0.2)
            await reader.read()
            writer.close()

        call = Call("r", "GET", "/v1/responses/x", Headers([]), None, changed=("half_characters",))
        exchange = SimpleNamespace(method="GET", target=b"/v1/responses/x", headers=Headers([]))
        async with await asyncio.start_unix_server(serve, socket):
            await pass_on(transport, socket, call, exchange, Reply(client), 0.3)

    yield ask, client
    await transport.aclose()


async def test_one_that_never_answers_is_a_time_limit(asked):
    ask, client = asked
    with pytest.raises(
        TimeLimit, match=r"was silent for 0\.3 s, .*\(timeouts\.first_byte_s, limits\.queue_s, "
    ):
        await ask()
    assert client.got == b""


async def test_a_stream_that_stands_still_breaks_off(asked):
    ask, client = asked
    await ask(HEAD, PIECE, PIECE)
    assert (b"x-kvpin-changed", b"half_characters") in client.headers
    assert client.got.startswith(b"data: {}\ndata: {}\n")
    assert b'"code":"time_limit"' in client.got
