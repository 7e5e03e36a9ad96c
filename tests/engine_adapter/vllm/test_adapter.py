"""What the contract suite cannot see of vLLM's adapter: restarts, ranks, LoRA, servers that can do less."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import aclosing

import pytest

from engine_adapter import (
    BlocksStored,
    CacheCleared,
    Capability,
    EngineRejected,
    EngineUnavailable,
    KvTarget,
    KvVerb,
    NotSupported,
    ViewCurrent,
    ViewResumed,
)
from engine_adapter.http.control import ControlClient
from engine_adapter.types import RESPONSES_ROUTES, EngineSpec
from engine_adapter.vllm.discovery import look
from tests.engine_adapter.builders import body
from tests.engine_adapter.vllm.test_requests import ROWS, encoded
from tests.fake_engines.text import chat_tokens, encode
from tests.fake_engines.vllm import running_vllm

TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture
def adapter_of(make):
    return lambda server, **fields: make("vllm", server.url, **fields)


async def complete(server, tokens, *, rank=None, **fields):
    headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
    request = {"prompt": list(tokens), "max_tokens": 1} | fields
    async with aclosing(ControlClient(EngineSpec("vllm", server.url, "e"))) as control:
        return await control.call("POST", TEXT, json=request, headers=headers)


async def until(events, kind):
    while not isinstance(event := await anext(events), kind):
        pass
    return event


async def operated(adapter, verb, target=KvTarget()):  # noqa: B008 - frozen
    return [progress async for progress in adapter.operate(verb, target)]


@pytest.mark.parametrize("identity", [True, False], ids=["by its start", "by a counter that falls"])
async def test_a_restarted_server_is_another(adapter_of, identity):
    with running_vllm(identity=identity) as server:
        adapter = adapter_of(server)
        first = await adapter.connect()
        await complete(server, range(100))
        await adapter.load()
        assert (await adapter.connect()).instance == first.instance
        server.fake.restart()
        with pytest.raises(EngineUnavailable, match="restarted"):
            await adapter.load()
        assert (await adapter.connect()).instance != first.instance
        await adapter.load()


@pytest.mark.parametrize(
    ("held", "slow", "fast"), [("discovery", "connect", "load"), ("adapter", "load", "connect")]
)
async def test_figures_that_are_older_than_the_last_noted_are_no_restart(
    adapter_of, monkeypatch, held, slow, fast
):
    """`/metrics` has no identity, and is read for two questions at once."""
    read, go = asyncio.Event(), asyncio.Event()

    async def held_look(*args):
        metrics = await look(*args)
        read.set()
        await go.wait()
        return metrics

    with running_vllm(identity=False) as server:
        adapter = adapter_of(server)
        first = await adapter.connect()
        with monkeypatch.context() as slowly:
            slowly.setattr(f"engine_adapter.vllm.{held}.look", held_look)
            asked = asyncio.create_task(getattr(adapter, slow)())
            await read.wait()
        await complete(server, range(100))
        await getattr(adapter, fast)()
        go.set()
        await asked
        await adapter.load()
        assert (await adapter.connect()).instance == first.instance
        server.fake.restart()
        with pytest.raises(EngineUnavailable, match="restarted"):
            await adapter.load()


async def test_the_load_of_a_server(adapter_of, transport):
    with running_vllm(num_gpu_blocks=11, block_size=16) as server:
        adapter = adapter_of(server)
        await adapter.connect()
        server.core.hold(after=1)
        running = adapter.prepare("POST", TEXT, JSON, body(prompt=[5] * 33, max_tokens=2, stream=True))
        async with await transport.send(running) as response:
            await response.receive()
            load = await adapter.load()
        assert (load.running, load.waiting, load.gpu_usage) == (1, 0, 0.2)
        server.core.release()


async def test_it_does_not_join_before_it_is_known_whether_it_heeds_salts(adapter_of, monkeypatch):
    with running_vllm() as server:
        adapter = adapter_of(server)
        with monkeypatch.context() as hasty:
            hasty.setattr("engine_adapter.vllm.discovery._PATIENCE_S", 0.0)
            with pytest.raises(EngineUnavailable, match="cache salts"):
                await adapter.connect()
        assert Capability.CACHE_SALT in (await adapter.connect()).capabilities
        assert not (await adapter.load()).outdated


async def test_adapters_are_served_under_their_own_names(adapter_of):
    with running_vllm(loras=("ada",)) as server:
        adapter = adapter_of(server)
        assert (await adapter.connect()).loras == {"ada"}
        async with aclosing(adapter.events()) as events:
            await until(events, ViewCurrent)
            await complete(server, range(40), model="ada", cache_salt="s")
            stored = await until(events, BlocksStored)
            assert (stored.lora, stored.salt) == ("ada", "s")
        assert (await adapter.tokenize(TEXT, body(model="ada", prompt="x"))).tolist() == encode("x")
        assert (await adapter.tokenize(TEXT, body(model="an alias", prompt="x"))).tolist() == encode("x")


async def test_each_rank_is_an_engine_of_its_own(adapter_of):
    with running_vllm(ranks=2) as server:
        adapters = [adapter_of(server, dp_rank=rank) for rank in (0, 1)]
        infos = [await adapter.connect() for adapter in adapters]
        assert infos[0].instance == infos[1].instance
        assert all(info.served_as_chats >= RESPONSES_ROUTES for info in infos)  # that route ignores the rank
        sent = adapters[1].prepare("POST", TEXT, {"X-Data-Parallel-Rank": "0"}, body(prompt="x"))
        ranks = [value for name, value in sent.headers if name == b"x-data-parallel-rank"]
        assert ranks == [b"1"]
        async with aclosing(adapters[1].events()) as events:
            await until(events, ViewCurrent)
            await complete(server, range(40), rank=0)
            await complete(server, range(80), rank=1)
            assert len((await until(events, BlocksStored)).hashes) == 5
            cleared = asyncio.create_task(until(events, CacheCleared))
            (progress,) = await operated(adapters[0], KvVerb.FLUSH)
            assert progress.left == {}
            assert await cleared


async def test_a_model_of_embeddings_is_flushed(adapter_of):
    """Also where nobody follows its events."""
    with running_vllm(embeds=True) as server:
        adapter = adapter_of(server)
        await adapter.connect()
        (alone,) = await operated(adapter, KvVerb.FLUSH)
        async with aclosing(adapter.events()) as events:
            await until(events, ViewCurrent)
            reading = asyncio.create_task(until(events, BlocksStored))  # takes what comes
            (followed,) = await operated(adapter, KvVerb.FLUSH)
            reading.cancel()
            await asyncio.wait({reading})
        assert (alone.left, followed.left) == ({}, {})


async def test_a_flush_that_no_event_tells_of_is_an_error(adapter_of, monkeypatch):
    with running_vllm() as server:
        adapter = adapter_of(server)
        await adapter.connect()
        monkeypatch.setattr("engine_adapter.vllm.adapter._EVENT_S", 0.0)
        async with aclosing(adapter.events()) as events:
            await until(events, ViewCurrent)
            with pytest.raises(EngineUnavailable, match="no event said so"):
                await operated(adapter, KvVerb.FLUSH)


async def test_another_reader_goes_on_where_one_stopped(adapter_of):
    with running_vllm() as server:
        first, then = adapter_of(server), adapter_of(server)
        for adapter in (first, then):
            await adapter.connect()
        assert first.event_position() is None
        async with aclosing(first.events()) as events:
            await until(events, ViewCurrent)
            await complete(server, range(40))
            await until(events, BlocksStored)
            waits = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            position = first.event_position()
            assert (await first.stats())["events"]["batches"] == 1
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
        await complete(server, range(80, 100))
        async with aclosing(then.events(position)) as events:
            seen = [await anext(events) for _ in range(3)]
        assert list(map(type, seen)) == [ViewResumed, BlocksStored, ViewCurrent]
        assert not seen[-1].complete  # of a block that is held twice, nobody knows that any more


async def test_blocks_with_embeddings_are_known_where_their_size_is(adapter_of):
    asked = body(prompt_embeds=encoded(ROWS))
    with running_vllm(enable_scale_out=False) as server:
        adapter = adapter_of(server)
        assert (await adapter.connect()).renders_embeds
        assert len((await adapter.render(TEXT, asked)).embeds) == 5
    with running_vllm(enable_scale_out=False, log_stats=False) as server:
        adapter = adapter_of(server)
        assert not (await adapter.connect()).renders_embeds
        with pytest.raises(EngineRejected, match="block size"):
            await adapter.render(TEXT, asked)


async def test_what_a_server_is_not_set_up_for_is_told_with_its_flag(adapter_of):
    chat = [{"role": "user", "content": "Hi"}]
    lacks = ("kv_events", "dev_mode", "enable_prompt_tokens_details", "knows_salts", "enable_scale_out")
    with running_vllm(**dict.fromkeys(lacks, False)) as server:
        adapter = adapter_of(server)
        assert adapter.findings() == ()
        assert (await adapter.connect()).capabilities == {Capability.TOKENIZE}
        assert len(adapter.findings()) == len(lacks)
        ids = await adapter.tokenize("/v1/chat/completions", body(messages=chat))
        assert ids == array("i", chat_tokens(chat))
        with pytest.raises(NotSupported, match="--enable-scale-out"):
            await adapter.render("/v1/chat/completions", body(messages=chat))
        with pytest.raises(NotSupported, match="VLLM_SERVER_DEV_MODE=1"):
            await operated(adapter, KvVerb.FLUSH)
        with pytest.raises(NotSupported, match="--kv-events-config"):
            await anext(adapter.events())
        with pytest.raises(NotSupported, match="lmcache="):
            await operated(adapter, KvVerb.OFFLOAD)
