import asyncio
import json
from contextlib import ExitStack, aclosing

import pytest

from engine_adapter import (
    BlocksStored,
    CacheCleared,
    Capability,
    EngineRejected,
    EngineUnavailable,
    JsonBody,
    KvTarget,
    KvVerb,
    NotSupported,
    ViewCurrent,
    ViewLost,
)
from engine_adapter.sglang import adapter as adapter_module
from engine_adapter.types import Attention, KvGroup, token_array
from tests.fake_engines.sglang import CHAT, COMPLETIONS, running_sglang

ALL = KvTarget()


WINDOWS = {"internal_states": [{"memory_usage": {"token_capacity_swa": 1600}}]}
"""What a server with sliding windows reports, whose pool has 1600 tokens."""


@pytest.fixture
def adapter_of(make):
    return lambda running, **fields: make("sglang", running.url, **fields)


@pytest.fixture
def start():
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(running_sglang(**options))


async def flushed(adapter, target=ALL, verb=KvVerb.FLUSH):
    async with aclosing(adapter.operate(verb, target)) as progress:
        return [part async for part in progress]


async def drained(events):
    return [event async for event in events]


async def complete(adapter, body):
    return await adapter._control.call("POST", COMPLETIONS, json=body)


class TestConnect:
    async def test_a_server_of_old(self, start, adapter_of):
        running = start(routes=(), version="0.5.5", enable_cache_report=False)
        adapter = adapter_of(running)
        info = await adapter.connect()
        assert info.capabilities == {Capability.TOKENIZE, Capability.CACHE_SALT, Capability.FLUSH}
        assert (await adapter.load()).running == 0

    async def test_the_host_tier_and_the_operators_tokenizer(self, start, adapter_of):
        hicache = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}
        adapter = adapter_of(start(page_size=16, capacity=10, server_info=hicache), tokenizer="mine")
        info = await adapter.connect()
        assert (info.gpu_blocks, info.host_blocks, info.tokenizer) == (10, 20, "mine")
        assert adapter.findings() == ()

    async def test_a_rank_that_is_not_there(self, start, adapter_of):
        with pytest.raises(EngineUnavailable, match=r"no dp_rank 1, only 1 rank\(s\)"):
            await adapter_of(start(), dp_rank=1).connect()


class TestLoad:
    async def test_the_figures_for_people_leave_a_restart_to_the_health_check(self, start, adapter_of):
        running = start()
        adapter = adapter_of(running)
        await adapter.connect()
        await complete(adapter, {"prompt": list(range(100)), "max_tokens": 1})
        await adapter.load()
        running.fake.restart()
        assert (await adapter.stats())["cache_hit_rate"] == 0.0
        with pytest.raises(EngineUnavailable, match="restarted"):
            await adapter.load()

    async def test_figures_that_are_older_than_those_for_people_are_no_restart(
        self, start, adapter_of, monkeypatch
    ):
        adapter = adapter_of(start())
        await adapter.connect()
        read, go, ranks = asyncio.Event(), asyncio.Event(), adapter._loads._ranks

        async def held_up():
            found = await ranks()
            read.set()
            await go.wait()
            return found

        with monkeypatch.context() as slowly:
            slowly.setattr(adapter._loads, "_ranks", held_up)
            load = asyncio.create_task(adapter.load())
            await read.wait()
        await complete(adapter, {"prompt": list(range(100)), "max_tokens": 1})
        await adapter.stats()
        go.set()
        await load

    async def test_adapters_come_and_go(self, start, adapter_of):
        running = start(loras=("calm",))
        adapter = adapter_of(running)
        info = await adapter.connect()
        assert (info.loras, info.host_blocks, info.max_model_len) == ({"calm"}, None, 1024)
        assert not (await adapter.load()).outdated
        running.fake.options = type(running.fake.options)(loras=("calm", "loud"))
        assert (await adapter.load()).outdated
        assert (await adapter.connect()).loras == {"calm", "loud"}
        assert not (await adapter.load()).outdated


class TestEvents:
    async def test_windows_are_told_where_they_are_known(self, start, adapter_of, tmp_path):
        """A window of 17 tokens needs the page before a boundary."""
        running = start(page_size=16, capacity=100, server_info=WINDOWS)
        (tmp_path / "config.json").write_text('{"sliding_window": 17}', encoding="utf-8")
        adapter = adapter_of(running, tokenizer=str(tmp_path))
        await adapter.connect()
        body, other = {"model": "tiny", "max_tokens": 1}, list(range(300, 364))
        target = KvTarget(token_array(other))
        await complete(adapter, body | {"prompt": list(range(100, 180))})
        async with adapter.hold(COMPLETIONS, JsonBody(json.dumps(body).encode()), target):
            pass  # nobody follows its events yet
        events = adapter.events()
        seen = [await anext(events) for _ in range(5)]
        assert list(map(type, seen)) == [ViewLost, CacheCleared, BlocksStored, BlocksStored, ViewCurrent]
        assert (seen[2].group, seen[3].group) == (None, KvGroup(1, Attention.WINDOW, 17))
        assert seen[3].hashes == seen[2].hashes[-1:]
        assert seen[4].complete
        assert adapter.event_position() is None
        # Of a prompt of whole pages, a page more is kept: its last token is computed again each time.
        async with adapter.hold(COMPLETIONS, JsonBody(json.dumps(body).encode()), target):
            await complete(adapter, body | {"prompt": other})
        stored, kept = [await anext(events) for _ in range(2)]
        assert kept.hashes == stored.hashes[-2:]
        await events.aclose()


class TestRequests:
    async def test_a_hold_of_nothing_and_before_the_first_connect(self, start, adapter_of):
        adapter = adapter_of(start(loras=("calm",)))
        body = JsonBody(b'{"model": "calm"}')
        async with adapter.hold(CHAT, body, None) as hold:
            assert hold.body is body
        await adapter.connect()
        async with adapter.hold("/v1/models", None, None) as hold:
            assert hold.body is None
        async with adapter.hold(CHAT, body, None) as hold:
            assert json.loads(hold.body.raw) == {"model": "calm", "lora_path": "calm"}

    async def test_without_reuse_adapters_and_salts_are_kept_to_as_well(self, start, adapter_of):
        adapter = adapter_of(start(loras=("calm",)))
        await adapter.connect()

        def sent(path, **fields):
            return json.loads(adapter.prepare("POST", path, {}, JsonBody(json.dumps(fields).encode())).body)

        assert sent(f"{CHAT}?a=b", model="calm") == {"model": "calm", "lora_path": "calm"}
        assert sent("/v1/messages", model="calm") == {"model": "tiny:calm"}
        assert set(sent(CHAT, extra_key="k")) == {"cache_salt"}
        with pytest.raises(EngineRejected, match="takes no cache_salt"):
            sent("/v1/messages", cache_salt="s")
        async with adapter.hold(CHAT, JsonBody(b'{"model": "calm"}'), None) as hold:
            assert adapter.prepare("POST", CHAT, {}, hold.body).body == hold.body.raw

    @pytest.mark.parametrize(
        ("options", "forwarded"),
        [({}, True), ({"jinja": False}, False), ({"version": "0.5.22"}, False)],
    )
    async def test_tokens_go_where_a_jinja_template_is_known_to_write_chats(
        self, start, adapter_of, options, forwarded
    ):
        adapter = adapter_of(start(**options))
        await adapter.connect()
        body = JsonBody(b'{"messages": [{"role": "user", "content": "hi"}]}')
        async with adapter.hold(CHAT, body, KvTarget(token_array([1, 2]), exact=True)) as hold:
            assert ("input_ids" in hold.body) is forwarded


class TestFlush:
    @pytest.mark.parametrize(("busy", "cleared_s", "left"), [(0, 30.0, {}), (1, 0.1, {"busy": 1})])
    async def test_of_a_rank_is_what_its_own_events_tell(
        self, start, adapter_of, monkeypatch, busy, cleared_s, left
    ):
        """The server answers as the rank does that answers first."""
        monkeypatch.setattr(adapter_module, "_FLUSH_S", 0.1)
        monkeypatch.setattr(adapter_module, "_CLEARED_S", cleared_s)
        running = start(ranks=2)
        adapter, core = adapter_of(running, dp_rank=1), running.fake.cores[busy]
        asked = {"model": "tiny", "prompt": [1, 2], "max_tokens": 1, "routed_dp_rank": busy}
        async with aclosing(adapter.events()) as events:
            while not isinstance(await anext(events), ViewCurrent):
                pass
            core.hold()
            sent = asyncio.create_task(complete(adapter_of(running, dp_rank=busy), asked))
            while not core.running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            following = asyncio.create_task(drained(events))
            (progress,) = await flushed(adapter)
            core.release()
            await sent
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        assert progress.left == left

    async def test_the_admin_key(self, start, adapter_of):
        running = start(admin_api_key="admin")
        without, having = adapter_of(running), adapter_of(running, api_key="admin")
        assert Capability.FLUSH not in (await without.connect()).capabilities
        with pytest.raises(NotSupported, match="--admin-api-key"):
            await flushed(without)
        assert Capability.FLUSH in (await having.connect()).capabilities
        await flushed(having)
