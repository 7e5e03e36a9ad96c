import asyncio
from array import array

from msgspec.structs import replace

from engine_adapter.http.adapter import EventWatch
from engine_adapter.types import (
    Attention,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvGroup,
    Tier,
    ViewCurrent,
    ViewLost,
)


def stored(*names, tier=Tier.GPU):
    return BlocksStored(tier, None, names, array("i"), 16)


def watching(capacity):
    watch = EventWatch()
    watch.capacity = capacity
    return watch


def told(watch, *events):
    for event in events:
        watch.note(event)
    return watch.wants_reuse_told


def test_reuse_is_to_be_told_while_the_view_is_incomplete():
    watch = watching(4)
    assert not told(watch, ViewLost("connected"), ViewCurrent())
    assert told(watch, ViewLost("again"), ViewCurrent(complete=False))
    assert not told(watch, CacheCleared())
    assert told(watch, ViewCurrent(complete=False))
    assert not told(watch, ViewLost("again"))


def test_once_as_many_became_known_as_there_are_it_ends():
    watch = watching(4)
    assert told(watch, stored(1), ViewCurrent(complete=False), stored(1, 2, 3), stored(2, 3))
    assert told(watch, BlocksRemoved(Tier.GPU, (2,)), stored(9, tier=Tier.HOST), stored(4))
    assert watch.blocks == 3
    group = KvGroup(1, Attention.WINDOW, 128)
    assert told(watch, replace(stored(9), group=group), BlocksRemoved(Tier.GPU, (1,), group))
    assert watch.blocks == 3
    assert not told(watch, stored(2))
    unknown = watching(None)
    assert told(unknown, ViewCurrent(complete=False), stored(*range(100)))


async def test_who_waits_for_a_clearing():
    watch = watching(4)
    told(watch, stored(1, 2))
    waiting = asyncio.create_task(watch.wait_for_clearing(watch.clearings, 20.0))
    await asyncio.sleep(0)
    told(watch, stored(3), CacheCleared())
    assert await waiting
    assert watch.blocks == 0
    assert await watch.wait_for_clearing(0, 0.0)
    assert not await watch.wait_for_clearing(1, 0.0)
