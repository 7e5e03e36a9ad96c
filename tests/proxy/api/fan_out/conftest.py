"""A scripted engine that takes no request for several, a proxy in front of it, and a client."""

import pytest

from tests.fakes import client_of, proxy_over


@pytest.fixture
async def proxy():
    async with proxy_over() as proxy:
        yield proxy
        await proxy.settled()


@pytest.fixture
async def client(engine, proxy):
    proxy.add(engine, runs_several=False)
    async with client_of(proxy) as client:
        yield client
