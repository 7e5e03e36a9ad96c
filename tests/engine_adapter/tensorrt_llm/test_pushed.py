"""The adapter before a fake trtllm-serve that pushes its events, or does not."""

import asyncio
from array import array

import pytest

from engine_adapter import KvTarget, KvVerb
from engine_adapter.tensorrt_llm import discovery, poller
from engine_adapter.tensorrt_llm.requests import CHAT
from engine_adapter.types import BlocksRemoved, BlocksStored, CacheCleared, Tier, ViewCurrent, ViewLost
from tests.engine_adapter.tensorrt_llm.test_adapter import HELLO, LORA, ask, followed, following
from tests.fake_engines.publisher import published
from tests.fake_engines.tensorrt_llm import running_trtllm


@pytest.fixture
def adapter_of(make):
    def adapter_of(server, **options):
        publisher = server.fake.publisher
        if publisher is not None:
            options = {"events": publisher.endpoint, "replay": publisher.replay_endpoint} | options
        given = {name: value for name, value in options.items() if value is not None}
        return make("tensorrt_llm", server.url, **given)

    return adapter_of


async def ask_about(adapter, first: int, **fields) -> int:
    """A prompt of 100 tokens, of which kvpin knows the ids."""
    tokens = list(range(first, first + 100))
    return await ask(adapter, target=KvTarget(array("i", tokens)), prompt=tokens, **fields)


async def test_they_are_followed_without_polling(adapter_of):
    with running_trtllm(pushes=True, replays=True, gpu_blocks=4, tells_block_size=False) as server:
        adapter = adapter_of(server)
        async with followed(adapter) as event:
            await ask_about(adapter, 0)
            stored = await event()
            assert (stored.tier, stored.parent, len(stored.hashes)) == (Tier.GPU, None, 3)
            assert (stored.token_ids, stored.tokens_per_block) == (array("i", range(96)), 32)
            assert discovery.BLOCK_SIZE_UNKNOWN not in adapter.findings()
            await ask_about(adapter, 200)
            removed = await event()
            assert isinstance(removed, BlocksRemoved)
            assert {*removed.hashes} <= {*stored.hashes}
            assert isinstance(await event(), BlocksStored)
            stats = await adapter.stats()
            assert stats["blocks"] == {"known": {"gpu": 1}}  # the other three count with the next call
            assert stats["events"]["batches"] > 0
            assert server.fake.publisher.published == 2
            assert adapter.event_position().sequence == 0  # the other batch is not taken before the next call
        assert server.fake.polls == 0


async def test_partial_reuse_makes_no_view_complete(adapter_of):
    with running_trtllm(pushes=True, replays=True, enable_partial_reuse=True) as server:
        async with following(adapter_of(server)) as event:
            assert [await event(), await event()] == [ViewLost("connected"), ViewCurrent(complete=False)]


async def test_a_flush_empties_the_view_before_the_next_message(adapter_of):
    with running_trtllm(pushes=True, replays=True) as server:
        adapter = adapter_of(server)
        async with followed(adapter) as event:
            await ask_about(adapter, 0)
            assert len((await event()).hashes) == 3
            first = asyncio.create_task(event())  # the blocks count once their reader asks for more
            await asyncio.sleep(0)
            done = [progress async for progress in adapter.operate(KvVerb.FLUSH, KvTarget())]
            assert [(progress.done, progress.total) for progress in done] == [(3, 3)]
            told = [await first, await event()]
            assert CacheCleared() in told
            assert (await adapter.stats())["blocks"] == {"known": {"gpu": 0}}
            assert await ask_about(adapter, 0) == 0


@pytest.mark.parametrize(
    ("fields", "finding"),
    [
        ({"path": CHAT, "messages": HELLO, "cache_salt": "s"}, poller.NO_SALT_IN_EVENTS),
        ({"prompt": [1, 2], "lora_request": LORA}, poller.NO_LORA_IN_EVENTS),
    ],
)
async def test_what_they_do_not_name_ends_the_view_before_it_is_read(adapter_of, fields, finding):
    with running_trtllm(pushes=True, replays=True) as server:
        adapter = adapter_of(server)
        async with followed(adapter) as event:
            await ask(adapter, **fields)
            assert await event() == ViewLost(finding.problem)
            assert finding in adapter.findings()


async def test_where_nothing_is_pushed_it_polls(adapter_of):
    """A version that takes no kv_events_config: what was buffered meanwhile is all there."""
    with running_trtllm() as server, published(topic="", replay=False) as silent:
        adapter = adapter_of(server, events=silent.endpoint)
        async with following(adapter) as event:
            assert [await event(), await event()] == [ViewLost("connected"), ViewCurrent(complete=False)]
            for at in range(poller.SILENT_PROMPTS):
                assert server.fake.polls == 0
                await ask_about(adapter, 200 * at)
            assert await event() == ViewLost("connected")
            stored = [await event() for _ in range(poller.SILENT_PROMPTS)]
            assert sum(len(each.hashes) for each in stored) == 3 * poller.SILENT_PROMPTS
            assert await event() == ViewCurrent(complete=True)
            assert poller.NOTHING_PUSHED in adapter.findings()
            assert server.fake.polls > 0


async def test_a_restart_begins_a_view_that_is_whole(adapter_of):
    with running_trtllm(pushes=True, replays=True) as server:
        adapter = adapter_of(server)
        async with followed(adapter) as event:
            await ask_about(adapter, 0)
            assert len((await event()).hashes) == 3
            server.fake.restart()
            with pytest.raises(discovery.EngineUnavailable, match="closed its event stream"):
                await event()
        async with followed(adapter):
            pass
