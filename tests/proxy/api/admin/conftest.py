import pytest

from tests.proxy.control.conftest import pair, world

__all__ = ["pair", "world"]


@pytest.fixture
async def client(world):
    async with world.client() as client:
        yield client
