"""A scripted engine, a proxy in front of it, and a client, each test's own."""

import pytest

from tests.fakes import FakeEngine, client_of, proxy_over


@pytest.fixture
async def engine():
    async with FakeEngine("a") as engine:
        yield engine


@pytest.fixture
async def other():
    async with FakeEngine("b") as engine:
        yield engine


@pytest.fixture
def adapters(engine):
    """What the proxy serves."""
    return [engine]


@pytest.fixture
def proxy_options():
    return {}


@pytest.fixture
async def proxy(adapters, proxy_options):
    """A proxy over one engine, if its test says nothing else; at the end no request may have left a trace."""
    async with proxy_over(*adapters, **proxy_options) as proxy:
        yield proxy
        await proxy.settled()


@pytest.fixture
async def client(proxy):
    async with client_of(proxy) as client:
        client.proxy = proxy
        yield client
