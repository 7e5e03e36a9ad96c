import pytest

from tests.kv_world import KvFake, kv_world


@pytest.fixture
async def world(tokenizer_dir):
    """A control plane with reuse, no engines yet."""
    async with kv_world(tokenizer_dir) as world:
        yield world


@pytest.fixture
def pair(world):
    """Two engines that can do everything."""
    fakes = KvFake("a"), KvFake("b")
    for fake in fakes:
        world.add(fake)
    return fakes


@pytest.fixture
async def client(world):
    async with world.client() as client:
        yield client
