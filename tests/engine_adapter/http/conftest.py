import pytest

from engine_adapter.http.client import HttpTransport


@pytest.fixture
async def transport():
    transport = HttpTransport(connect_timeout_s=2)
    yield transport
    await transport.aclose()
