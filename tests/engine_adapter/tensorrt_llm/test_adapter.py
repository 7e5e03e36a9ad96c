"""The adapter before a fake trtllm-serve on a real socket."""

import asyncio
import json
from array import array
from contextlib import aclosing, asynccontextmanager
from functools import partial

import httpx
import pytest
from starlette.responses import JSONResponse

from engine_adapter import EngineRejected, EngineUnavailable, JsonBody, KvTarget, KvVerb, NotSupported, base
from engine_adapter.events.subscriber import KvEventSubscriber
from engine_adapter.tensorrt_llm import adapter as module
from engine_adapter.tensorrt_llm import discovery, poller
from engine_adapter.tensorrt_llm.adapter import EVENTS_LOST, NO_HOST_TIER
from engine_adapter.tensorrt_llm.requests import CHAT, COMPLETIONS
from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Tier,
    ViewCurrent,
    ViewLost,
)
from tests.engine_adapter.tensorrt_llm.test_events import answer, created
from tests.fake_engines.publisher import published
from tests.fake_engines.tensorrt_llm import running_trtllm
from tests.fake_engines.text import chat_tokens, encode

WAIT_S = 10
HELLO = [{"role": "user", "content": "Hello there"}]
LORA = {"lora_name": "l", "lora_int_id": 1, "lora_path": "/l"}


def body(**fields) -> JsonBody:
    return JsonBody(json.dumps({"model": "tiny", "max_tokens": 2} | fields).encode())


@pytest.fixture
def adapter_of(make):
    return lambda url, **fields: make("tensorrt_llm", url, **fields)


@pytest.fixture
def server():
    with running_trtllm() as server:
        yield server


@pytest.fixture
def adapter(adapter_of, server):
    return adapter_of(server.url)


async def ask(adapter, path=COMPLETIONS, target=None, **fields) -> int:
    async with adapter.hold(path, body(**fields), target) as hold:
        request = adapter.prepare("POST", path, {}, hold.body)
        async with httpx.AsyncClient() as client:
            got = await client.post(request.url, content=request.body)
    assert got.status_code == 200, got.text
    return got.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@asynccontextmanager
async def following(adapter):
    async with aclosing(adapter.events()) as events:

        async def next_event():
            async with asyncio.timeout(WAIT_S):
                return await anext(events)

        yield next_event


@asynccontextmanager
async def followed(adapter):
    """What comes after the beginning of a view that is whole."""
    async with following(adapter) as event:
        assert [await event(), await event()] == [ViewLost("connected"), ViewCurrent(complete=True)]
        yield event


async def test_what_it_is(adapter, adapter_of, server):
    info = await adapter.connect()
    assert (info.model, info.tokenizer, info.version) == ("tiny", "/models/tiny", "TensorRT-LLM 1.4.0")
    assert (info.tokens_per_block, info.gpu_blocks, info.host_blocks) == (32, 64, None)
    assert await adapter.connect() == info
    named = await adapter_of(server.url, model="n", tokenizer="/t").connect()
    assert (named.model, named.tokenizer) == ("n", "/t")
    assert named.instance != info.instance
    load = await adapter.load()
    assert (load.running, load.waiting, load.gpu_usage, load.outdated) == (0, 0, 0.0, False)
    assert adapter.findings() == ()


async def test_what_takes_figures_away_is_read_seldom(adapter_of, monkeypatch):
    with running_trtllm(prometheus=False) as server:
        adapter = adapter_of(server.url)
        server.fake.core.waiting = 3
        server.fake._end_of_step()
        assert (await adapter.load()).waiting == 3
        server.fake._end_of_step()
        assert (await adapter.load()).waiting == 3
        assert len(server.fake.steps) == 1
        monkeypatch.setattr(adapter, "_next_stats", 0.0)
        await adapter.load()
        assert server.fake.steps == []


class TestRequests:
    async def test_the_model_is_named_where_the_client_did_not(self, adapter, server):
        await adapter.connect()
        await ask(adapter, CHAT, messages=HELLO, model=None)
        assert server.fake.seen[-1][1]["model"] == "tiny"
        unnamed = JsonBody(json.dumps({"messages": HELLO}).encode())
        prepared = adapter.prepare("POST", f"{CHAT}?a=b", {}, unnamed)  # without reuse, nothing holds it
        assert json.loads(prepared.body)["model"] == "tiny"
        assert await adapter.tokenize(CHAT, unnamed) == array("i", chat_tokens(HELLO))
        async with adapter.hold("/v1/responses", unnamed, None) as hold:
            assert "model" not in hold.body

    @pytest.mark.parametrize("path", [COMPLETIONS, f"{COMPLETIONS}?a=b", "/v1/responses"])
    async def test_a_salt_where_none_is_taken_is_refused_without_reuse_as_well(self, adapter, path):
        with pytest.raises(EngineRejected, match="takes no cache_salt"):
            adapter.prepare("POST", path, {}, body(prompt="x", cache_salt="s"))

    async def test_a_request_that_fails_is_over_as_well(self, adapter):
        async def fail():
            async with adapter.hold(CHAT, body(messages=HELLO), None):
                assert adapter._poller.traffic.in_flight == 1
                raise EngineUnavailable("gone")

        with pytest.raises(EngineUnavailable, match="gone"):
            await fail()
        assert adapter._poller.traffic.in_flight == 0


class TestTokens:
    async def test_they_are_those_it_runs(self, adapter):
        chat = await adapter.tokenize(CHAT, body(messages=HELLO, session_id="s", cache_salt="x"))
        assert chat == array("i", chat_tokens(HELLO))
        text = await adapter.tokenize(COMPLETIONS, body(prompt="Hello", cache_salt="x", prompt_cache_key="k"))
        assert text == array("i", encode("Hello"))
        assert await adapter.tokenize(COMPLETIONS, body(prompt=[5, 6])) == array("i", [5, 6])

    @pytest.mark.parametrize(
        ("rendered", "error"),
        [
            ({"token_ids": [1], "tokens_trusted": False}, EngineRejected),
            ([{"token_ids": [1]}, {"token_ids": [2]}], EngineRejected),
            ([], EngineRejected),
            ({"token_ids": "1"}, EngineUnavailable),
            ("no", EngineUnavailable),
        ],
    )
    async def test_ids_that_need_not_be_those_it_runs(self, adapter, server, monkeypatch, rendered, error):
        await adapter.connect()
        (render,) = (route for route in server.fake.app.routes if route.path == f"{CHAT}/render")
        monkeypatch.setattr(render, "app", JSONResponse(rendered))
        with pytest.raises(error):
            await adapter.tokenize(CHAT, body(messages=HELLO))


async def test_what_an_older_server_lacks_is_named_with_what_mends_it(adapter_of):
    with running_trtllm(renders=False, reset_path=None) as server:
        adapter = adapter_of(server.url)
        with pytest.raises(NotSupported, match="TRTLLM_ENABLE_RENDER_ENDPOINTS=1"):
            await adapter.tokenize(CHAT, body(messages=HELLO))
        with pytest.raises(NotSupported, match="restart the engine"):
            await anext(adapter.operate(KvVerb.FLUSH, KvTarget()))
        assert {discovery.NO_TOKENIZE, discovery.NO_RESET} <= set(adapter.findings())


class TestEvents:
    async def test_they_follow_what_it_stores_moves_and_forgets(self, adapter_of):
        with running_trtllm(gpu_blocks=4, host_blocks=2) as server:
            adapter = adapter_of(server.url)
            async with followed(adapter) as event:
                await ask(adapter, prompt=list(range(100)))
                stored = await event()
                assert (stored.tier, stored.parent, len(stored.hashes)) == (Tier.GPU, None, 3)
                assert stored.token_ids == array("i", range(96))
                await ask(adapter, prompt=list(range(200, 270)))
                moved, left = await event(), await event()
                assert moved == BlocksStored(Tier.HOST, None, stored.hashes[2:], array("i"), 32)
                assert left == BlocksRemoved(Tier.GPU, stored.hashes[2:])
                stats = await adapter.stats()
                assert stats["blocks"]["capacity"] == [4, 2]
                assert stats["blocks"]["known"] == {"gpu": 4, "host": 1}
                assert stats["events"] == {"skipped": 0, "gaps": 0, "restarts": 0}
            info = await adapter.connect()
            assert (info.gpu_blocks, info.host_blocks) == (4, 2)
            assert NO_HOST_TIER not in adapter.findings()

    async def test_events_that_somebody_else_took_are_missed(self, adapter, server):
        await adapter.connect()
        async with followed(adapter) as event:
            server.fake.events.tell({"type": "removed", "block_hashes": []})
            server.fake.events.flush()
            server.fake.events.lose(1)
            await ask(adapter, prompt=list(range(100)))
            assert await event() == ViewLost("events 1 to 1 were lost")
        assert EVENTS_LOST in adapter.findings()
        assert (await adapter.load()).outdated  # so that it is told
        await adapter.connect()
        assert not (await adapter.load()).outdated

    async def test_another_block_size_is_seen_and_told(self, adapter_of):
        options = {"tokens_per_block": 64, "tells_block_size": False, "prometheus": False, "host_blocks": 1}
        with running_trtllm(**options) as server:
            adapter = adapter_of(server.url)
            assert (await adapter.connect()).tokens_per_block == 32
            assert discovery.BLOCK_SIZE_UNKNOWN in adapter.findings()
            async with following(adapter) as event:
                await event()
                await event()
                assert not (await adapter.load()).outdated
                await ask(adapter, prompt=list(range(130)))
                assert (await event()).tokens_per_block == 64
            assert (await adapter.load()).outdated
            assert (await adapter.connect()).tokens_per_block == 64
            assert discovery.BLOCK_SIZE_UNKNOWN not in adapter.findings()
            async with following(adapter) as event:  # another view knows it from the start
                await event()
                assert not (await adapter.load()).outdated

    async def test_windows_that_cannot_be_followed_are_told_of(self, adapter):
        adapter._poller.reader.read(answer(created(), window_size=16))
        adapter._poller.reader.read(answer(created(), first=1))
        assert module.SEVERAL_WINDOWS not in adapter.findings()
        adapter._poller.reader.read(answer(created(), first=2, window_size=-1))
        assert module.SEVERAL_WINDOWS in adapter.findings()

    async def test_adapters_it_does_tell_of_are_kept_apart(self, adapter_of):
        with running_trtllm(tells_lora=True) as server:
            adapter = adapter_of(server.url)
            async with followed(adapter) as event:
                await ask(adapter, prompt=list(range(100)), lora_request=LORA)
                assert (await event()).lora == "lora_id 1"
                await ask(adapter, prompt=list(range(100)))
                assert (await event()).lora is None


@pytest.fixture
def often(monkeypatch):
    """It is looked often whether anything else ends the view."""
    monkeypatch.setattr(base, "KvEventSubscriber", partial(KvEventSubscriber, idle_check_s=0.02))


@pytest.fixture
def pushed_by(make, often):
    def pushed_by(server):
        publisher = server.fake.publisher
        return make("tensorrt_llm", server.url, events=publisher.endpoint, replay=publisher.replay_endpoint)

    return pushed_by


async def ask_about(adapter, first: int, **fields) -> int:
    """A prompt of 100 tokens, of which kvpin knows the ids."""
    tokens = list(range(first, first + 100))
    return await ask(adapter, target=KvTarget(array("i", tokens)), prompt=tokens, **fields)


async def test_partial_reuse_makes_no_view_complete_nor_does_a_flush(pushed_by):
    with running_trtllm(pushes=True, replays=True, enable_partial_reuse=True) as server:
        adapter = pushed_by(server)
        async with following(adapter) as event:
            assert [await event(), await event()] == [ViewLost("connected"), ViewCurrent(complete=False)]
            async with aclosing(adapter.operate(KvVerb.FLUSH, KvTarget())) as steps:
                assert [progress async for progress in steps]
            assert [await event(), await event()] == [CacheCleared(), ViewCurrent(complete=False)]


async def test_a_flush_empties_the_view_before_the_next_message(pushed_by):
    with running_trtllm(pushes=True, replays=True, tells_block_size=False) as server:
        adapter = pushed_by(server)
        async with followed(adapter) as event:
            await ask_about(adapter, 0)
            assert len((await event()).hashes) == 3
            assert discovery.BLOCK_SIZE_UNKNOWN not in adapter.findings()
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
async def test_what_they_do_not_name_ends_the_view_before_it_is_read(pushed_by, fields, finding):
    with running_trtllm(pushes=True, replays=True) as server:
        adapter = pushed_by(server)
        async with followed(adapter) as event:
            await ask(adapter, **fields)
            assert await event() == ViewLost(finding.problem)
            assert finding in adapter.findings()


async def test_where_nothing_is_pushed_it_polls(adapter_of, often):
    """A version that takes no kv_events_config: what was buffered meanwhile is all there."""
    with running_trtllm() as server, published(topic="", replay=False) as silent:
        adapter = adapter_of(server.url, events=silent.endpoint)
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


async def test_a_restart_begins_a_view_that_is_whole(pushed_by):
    with running_trtllm(pushes=True, replays=True) as server:
        adapter = pushed_by(server)
        async with followed(adapter) as event:
            await ask_about(adapter, 0)
            assert len((await event()).hashes) == 3
            server.fake.restart()
            with pytest.raises(discovery.EngineUnavailable, match="closed its event stream"):
                await event()
        async with followed(adapter):
            pass
