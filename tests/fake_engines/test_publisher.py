import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.events.subscriber import EventEndpoints, KvEventSubscriber
from engine_adapter.types import BlocksStored, ViewCurrent, ViewLost
from tests.fake_engines.publisher import published


def stored(name):
    fields = {"block_hashes": [name], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    return {"type": "BlockStored", **fields}


def follow(publisher, **options):
    endpoints = EventEndpoints(publisher.endpoint, publisher.replay_endpoint, publisher.topic)
    return KvEventSubscriber(endpoints, idle_check_s=0.02, **options)


async def until(events, kind):
    while not isinstance(event := await anext(events), kind):
        pass
    return event


@pytest.mark.parametrize("topic_in_replay", [True, False])
async def test_a_late_reader_gets_all_and_a_dropped_batch_comes_by_replay(topic_in_replay):
    with published(topic_in_replay=topic_in_replay) as publisher:
        publisher.publish([stored(1)])
        publisher.publish([])
        events = follow(publisher).events()
        assert isinstance(await anext(events), ViewLost)
        assert (await anext(events)).hashes == (1,)
        assert isinstance(await anext(events), ViewCurrent)
        publisher.dropping = 1
        for name in (2, 3):
            publisher.publish([stored(name)])
            assert (await until(events, BlocksStored)).hashes == (name,)
        await events.aclose()


async def test_a_restart_ends_the_stream_and_begins_at_0():
    with published() as publisher:
        publisher.publish([stored(1)])
        events = follow(publisher).events()
        await until(events, ViewCurrent)
        publisher.restart()
        with pytest.raises(EngineUnavailable):
            await anext(events)
        publisher.publish([stored(9)])
        assert (publisher.published, (await until(follow(publisher).events(), BlocksStored)).hashes) == (
            1,
            (9,),
        )


async def test_what_was_forgotten_is_not_replayed():
    with published() as publisher:
        publisher.publish([stored(1)])
        publisher.forget()
        publisher.publish([stored(2)])
        events = follow(publisher).events()
        first = [await anext(events) for _ in range(3)]
        await events.aclose()
    assert not any(isinstance(event, BlocksStored) and event.hashes == (1,) for event in first)


async def test_without_a_replay_socket():
    with published(replay=False) as publisher:
        assert publisher.replay_endpoint is None
        publisher.publish([stored(1)])
        events = follow(publisher).events()
        assert [type(await anext(events)) for _ in range(2)] == [ViewLost, ViewCurrent]
        await events.aclose()
