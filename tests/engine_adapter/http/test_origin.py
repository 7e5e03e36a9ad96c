"""Where connections go."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from engine_adapter.errors import EngineUnavailable, EngineUnhealthy, EngineUnreachable
from engine_adapter.http import client
from engine_adapter.http.client import HttpTransport
from engine_adapter.http.prepare import OutgoingRequest
from tests.engine_adapter.http.raw_engine import Wire, raw_engine

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


async def closing(wire):
    await wire.head()
    await wire.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


async def ask(transport, url):
    async with await transport.send(OutgoingRequest("GET", url)) as response:
        await response.read()


async def test_every_address_of_a_name_is_tried_and_the_good_one_is_remembered(transport, monkeypatch):
    async with raw_engine(closing) as (url, wires):
        names = Names(monkeypatch)
        named = url.replace("127.0.0.1", "engine.internal")
        for _ in range(2):
            await ask(transport, named)
        assert names.tried == [DEAF, "127.0.0.1", "127.0.0.1"]
        assert names.asked == ["engine.internal"], "looked up once, for a while"
        assert b"host: engine.internal:" in wires[0].seen


async def test_a_name_is_looked_up_again_after_a_while_or_when_it_leads_nowhere(transport, monkeypatch):
    async with raw_engine(closing) as (url, _):
        names = Names(monkeypatch)
        named = url.replace("127.0.0.1", "engine.internal")
        names.addresses = [DEAF]
        with pytest.raises(EngineUnreachable, match=r"cannot connect to engine\.internal:\d+: "):
            await ask(transport, named)
        monkeypatch.setattr(client, "DNS_S", 0.0)
        names.addresses = ["127.0.0.1"]
        for _ in range(2):
            await ask(transport, named)
        assert len(names.asked) == 3
        names.addresses = []
        with pytest.raises(EngineUnavailable, match="Name or service not known"):
            await ask(transport, named)


async def test_an_address_is_never_looked_up(transport, monkeypatch):
    async with raw_engine(closing) as (url, _):
        names = Names(monkeypatch)
        await ask(transport, url)
        assert not names.asked


async def test_a_connection_that_takes_too_long():
    async with raw_engine(Wire.left) as (url, _):
        address = url.replace("http:", "https:").rstrip("/")
        with pytest.raises(EngineUnhealthy, match=r"no answer within 0\.05 s$"):
            await client.Origin(address, None, 0.05).connect()
        transport = HttpTransport(connect_timeout_s=0.05, setting="timeouts.connect_s")
        with pytest.raises(EngineUnhealthy, match=r"no answer within 0\.05 s \(timeouts\.connect_s\)$"):
            await ask(transport, f"{address}/")
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
