"""Servers that take one adapter at a time."""

import asyncio

import pytest

from proxy.control.server_use import ServerUse
from tests.kv_world import KvFake, until


class Single(KvFake):
    """Takes one adapter at a time."""

    one_owner = True


@pytest.fixture
def use(world):
    return ServerUse(world.fleet, world.proxy.tasks)


async def test_a_free_server_is_connected_at_once(world, use):
    begun = []
    use.begin(world.fleet.add(Single("a")), lambda: begun.append("a"))
    assert begun == ["a"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_server_is_connected_once_the_adapter_that_leaves_is_closed(world, use, fails):
    old, begun, is_saved = world.fleet.add(Single("a")), [], asyncio.Event()

    async def aclose():
        await is_saved.wait()
        if fails:
            raise OSError("the disk is full")

    old.adapter.aclose = aclose
    world.fleet.remove(old)
    closing = asyncio.create_task(use.close(old))
    await asyncio.sleep(0)
    new = world.fleet.add(Single("a"))
    use.begin(new, lambda: begun.append("a"))
    assert (begun, use.is_held(new)) == ([], True)
    is_saved.set()
    (error,) = await asyncio.gather(closing, return_exceptions=True)
    assert isinstance(error, OSError) is fails
    await until(lambda: begun == ["a"])
    assert not use.is_held(new)


async def test_an_engine_that_goes_while_it_waits_is_not_connected(world, use):
    old, begun = world.fleet.add(Single("a")), []
    world.fleet.remove(old)
    use.leaves(old)
    new = world.fleet.add(Single("a"))
    use.begin(new, lambda: begun.append("a"))
    world.fleet.remove(new)
    await until(lambda: not use.is_held(new))
    assert begun == []
