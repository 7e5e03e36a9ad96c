import asyncio

import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.types import BlocksStored, CacheCleared, EngineSpec, KvProgress, Tier, token_array
from engine_adapter.vllm.event_watch import EventWatch, flush
from tests.fake_engines.cache import CachePrompt
from tests.fake_engines.vllm import running_vllm


@pytest.fixture
def server():
    with running_vllm(ranks=2) as server:
        yield server


@pytest.fixture
async def control(server):
    control = ControlClient(EngineSpec("vllm", server.url, "e"))
    yield control
    await control.aclose()


def knowing(*names):
    watch = EventWatch(100)
    watch.note(BlocksStored(Tier.GPU, None, names, token_array([]), 16))
    return watch


async def test_every_rank_is_nudged_so_that_its_events_say_so(server, control):
    for core in server.fake.cores:
        core.cache.begin(CachePrompt(tuple(range(40)))).close()
    assert await flush(control, "tiny", (0, 1), knowing(1, 2, 3)) == KvProgress(3, 3)
    assert [rank for rank, _ in server.fake.seen] == [0, 1]
    assert [publisher.published for publisher in server.fake.publishers] == [1, 1]
    assert not any(len(core.cache) for core in server.fake.cores)


async def test_while_a_request_runs_everything_stays(server, control):
    running = server.core.cache.begin(CachePrompt(tuple(range(40))))
    assert await flush(control, "tiny", (0,), knowing(1, 2)) == KvProgress(0, 2, left={"busy": 2})
    assert await flush(control, "tiny", (0,), EventWatch(9)) == KvProgress(0, 0, left={"busy": 1})
    running.close()
    assert server.fake.seen == []


async def test_the_event_is_waited_for_where_somebody_reads(control, monkeypatch):
    watch = knowing(1)
    with watch.follower():
        flushing = asyncio.create_task(flush(control, "tiny", (0,), watch))
        asyncio.get_running_loop().call_later(0.05, watch.note, CacheCleared())
        assert await flushing == KvProgress(1, 1)
        monkeypatch.setattr("engine_adapter.vllm.event_watch._EVENT_S", 0.0)
        with pytest.raises(EngineUnavailable, match="no event said so"):
            await flush(control, "tiny", (0,), watch)
