"""vLLM over LMCache, both fake, on real sockets: its adapter, and kvpin in front of it."""

import json
from array import array
from contextlib import ExitStack, aclosing

import httpx
import pytest
from msgspec.structs import replace

from engine_adapter import EngineSpecError, JsonBody, NotSupported, make_adapter
from engine_adapter.lmcache.salts import salt_for
from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Capability,
    KvTarget,
    KvVerb,
    Tier,
    ViewCurrent,
)
from engine_adapter.vllm import tiered
from engine_adapter.vllm.adapter import VllmAdapter
from engine_adapter.vllm.tiered import TieredVllmAdapter
from tests.engines import engine_spec
from tests.fake_engines.lmcache import running_lmcache, running_tiered_vllm

PROMPT = array("i", range(300, 600))  # four chunks of 64, and a rest
TARGET = KvTarget(PROMPT)
COMPLETIONS = "/v1/completions"
MOVES = {Capability.OFFLOAD, Capability.RESTORE, Capability.PIN}


@pytest.fixture
def lmcache():
    with running_lmcache() as lmcache:
        yield lmcache


@pytest.fixture
def start_vllm(lmcache):
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(running_tiered_vllm(lmcache, **options))


@pytest.fixture
def vllm(start_vllm):
    """Its address and the fake: two blocks in a chunk, and a LoRA adapter."""
    return start_vllm(block_size=32, loras=("ada",))


@pytest.fixture
async def adapter(lmcache, vllm):
    adapter = make_adapter(engine_spec("vllm", vllm[0], "v", lmcache=lmcache.url))
    yield adapter
    await adapter.aclose()


async def result(steps):
    async with aclosing(steps):
        return [progress async for progress in steps][-1]


async def ask(adapter, *, salt=None, model="tiny", path=COMPLETIONS, prompt=PROMPT):
    """A request as kvpin sends it; the tokens the engine reused."""
    fields = {"model": model, "prompt": list(prompt), "max_tokens": 1, "cache_salt": salt}
    body = JsonBody(json.dumps({k: v for k, v in fields.items() if v is not None}).encode())
    target = KvTarget(prompt, cache_salt=salt, lora=model if model != "tiny" else None)
    async with adapter.hold(path, body, target) as hold:
        request = adapter.prepare("POST", path, {"content-type": "application/json"}, hold.body)
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(request.url, content=request.body, headers=dict(request.headers))
    return answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_which_adapter_is_made():
    assert type(make_adapter(engine_spec("vllm", "http://h:1", "v"))) is VllmAdapter
    tiered = make_adapter(engine_spec("vllm", "http://h:1", "v", lmcache="http://h:2"))
    assert type(tiered) is TieredVllmAdapter
    with pytest.raises(EngineSpecError, match="lmcache_coordinator goes with lmcache="):
        make_adapter(engine_spec("vllm", "http://h:1", "v", lmcache_coordinator="http://h:3"))
    with pytest.raises(EngineSpecError, match="is not an http:// or https:// address"):
        make_adapter(engine_spec("vllm", "http://h:1", "v", lmcache="h:2"))


class TestWhatItIs:
    async def test_lmcache_adds_to_it(self, adapter):
        info = await adapter.connect()
        assert info.capabilities >= MOVES
        assert info.tokens_per_chunk == 64
        assert adapter.findings() == ()
        assert not (await adapter.load()).outdated

    async def test_without_it_the_rest_goes_on(self, lmcache, adapter):
        info = await adapter.connect()
        lmcache.node_error = 503
        assert (await adapter.load()).outdated
        without = await adapter.connect()
        assert without.capabilities == info.capabilities - MOVES
        assert (without.tokens_per_chunk, without.instance) == (None, info.instance)
        (finding,) = adapter.findings()
        assert lmcache.url in finding.problem
        assert not (await adapter.load()).outdated
        assert await adapter.lookup(TARGET) is None
        assert (await adapter.stats())["lmcache"] == {"error": str(finding)}
        assert await ask(adapter) == 0
        for work in (
            result(adapter.operate(KvVerb.OFFLOAD, TARGET)),
            adapter.pin(TARGET, 1),
            adapter.unpin(""),
        ):
            with pytest.raises(NotSupported, match="is not reachable"):
                await work
        await result(adapter.operate(KvVerb.FLUSH, KvTarget()))
        lmcache.node_error = None
        assert (await adapter.load()).outdated
        assert (await adapter.connect()).capabilities == info.capabilities

    async def test_what_it_cannot_do_for_other_reasons_is_told_as_ever(self, adapter):
        await adapter.connect()
        assert "embedded engine" in adapter.not_supported(Capability.PROMPT_TABLES).instead

    async def test_stats_have_both(self, lmcache, adapter):
        await adapter.connect()
        await ask(adapter)
        stats = await adapter.stats()
        assert stats["lmcache"]["l1"]["objects"] == 4
        assert stats["prefix_cache"]["queried_tokens"] >= len(PROMPT)
        lmcache.node_error = 500
        assert "error" in (await adapter.stats())["lmcache"]

    async def test_adapters_that_cannot_be_kept_apart_are_a_finding(self, lmcache, start_vllm):
        url, _ = start_vllm(loras=("ada",), knows_salts=False)
        adapter = make_adapter(engine_spec("vllm", url, "v", lmcache=lmcache.url))
        await adapter.connect()
        assert "takes no cache_salt" in adapter.findings()[-1].problem
        await adapter.aclose()

    async def test_without_its_address_it_is_a_finding(self, vllm):
        adapter = make_adapter(engine_spec("vllm", vllm[0], "v"))
        await adapter.connect()
        assert "lmcache=http://HOST:PORT" in adapter.findings()[0].remedy
        await adapter.aclose()


class TestRequests:
    async def test_what_was_computed_is_found_below(self, vllm, adapter):
        await adapter.connect()
        assert await ask(adapter) == 0
        vllm[1].cores[0].reset()
        below = await adapter.lookup(TARGET)
        assert below.cached == await ask(adapter) == 256

    async def test_adapters_are_kept_apart(self, lmcache, vllm, adapter):
        await adapter.connect()
        asked = [{}, {"model": "ada"}, {"salt": "s"}, {"salt": "s", "model": "ada"}]
        assert [await ask(adapter, **each) for each in asked] == [0, 0, 0, 0]
        vllm[1].cores[0].reset()
        assert [await ask(adapter, **each) for each in asked] == [256] * 4
        assert lmcache.mixed == 0
        sent = [body.get("cache_salt") for _, body in vllm[1].seen[-4:]]
        assert sent == [None, salt_for(None, "ada"), "s", salt_for("s", "ada")]

    async def test_without_kvpin_they_are_mixed(self, lmcache, vllm):
        """What the salts are for."""
        async with httpx.AsyncClient(base_url=vllm[0], trust_env=False) as client:
            for model in ("tiny", "ada"):
                body = {"model": model, "prompt": list(PROMPT), "max_tokens": 1}
                (await client.post(COMPLETIONS, json=body)).raise_for_status()
        assert lmcache.mixed == 256

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/completions?api-version=1",
            "/v1/%63ompletions",
            "/v1//completions",
            "/v1/completions/",
            "/v1/chat/completions/batch",
        ],
    )
    async def test_so_they_are_however_the_route_is_written(self, adapter, path):
        await adapter.connect()
        body = JsonBody(b'{"model": "ada", "prompt": "x"}')
        assert json.loads(adapter.prepare("POST", path, {}, body).body)["cache_salt"] == salt_for(None, "ada")

    async def test_embeddings_are_kept_apart(self, adapter):
        assert not (await adapter.connect()).renders_embeds
        salts = []
        for data in ("QQ==", "Qg==", "QQ=="):
            body = JsonBody(json.dumps({"model": "tiny", "prompt_embeds": data}).encode())
            salts.append(json.loads(adapter.prepare("POST", COMPLETIONS, {}, body).body)["cache_salt"])
        assert salts[0] == salts[2] != salts[1]

    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("/v1/embeddings", {"model": "ada", "input": "x"}),
            (COMPLETIONS, {"model": "tiny", "prompt": "x"}),
            (COMPLETIONS, {"model": "ada", "prompt": "x", "cache_salt": 5}),
        ],
    )
    async def test_other_requests_go_as_they_are(self, adapter, path, fields):
        await adapter.connect()
        body = JsonBody(json.dumps(fields).encode())
        assert adapter.prepare("POST", path, {}, body).body == body.raw
        assert adapter.prepare("GET", "/v1/models", {}, None).body is None


class TestEvents:
    async def test_a_request_is_found_under_its_own_salt(self, adapter):
        await adapter.connect()
        stored = []
        async with aclosing(adapter.events()) as events:
            async for event in events:
                if isinstance(event, ViewCurrent):
                    break
            for each in ({"model": "ada"}, {"salt": "s", "model": "ada"}, {"salt": "s"}):
                await ask(adapter, **each)
                async for event in events:
                    if isinstance(event, BlocksStored):
                        stored.append((event.salt, event.lora))
                        break
        assert stored == [(None, "ada"), ("s", "ada"), ("s", None)]

    def test_what_is_told_of_tiers_below_could_be_anybodys(self):
        stored = BlocksStored(Tier.HOST, None, (b"1",), PROMPT[:64], 64)
        assert tiered._of_gpu(stored) is None
        assert tiered._of_gpu(BlocksRemoved(Tier.HOST, (b"1",))) is None
        for event in (replace(stored, tier=Tier.GPU), BlocksRemoved(Tier.GPU, (1,)), CacheCleared()):
            assert tiered._of_gpu(event) == event


class TestOperations:
    async def test_offload_restore_and_pin_are_lmcaches(self, lmcache, adapter):
        await adapter.connect()
        await ask(adapter)
        assert (await result(adapter.operate(KvVerb.OFFLOAD, TARGET))).done == 8
        assert lmcache.tiers(PROMPT) == ["l2"] * 4
        assert (await result(adapter.operate(KvVerb.RESTORE, TARGET))).done == 8
        assert lmcache.tiers(PROMPT) == ["l1+l2"] * 4
        pinned = await adapter.pin(TARGET, 60)
        assert (pinned.blocks, len(lmcache.pins)) == (8, 4)
        assert await adapter.unpin(pinned.pin_id)

    async def test_a_flush_means_gone(self, lmcache, vllm, adapter):
        await adapter.connect()
        for salt in (None, "s"):
            await ask(adapter, salt=salt)
        lmcache.evict(PROMPT)
        assert (await result(adapter.operate(KvVerb.FLUSH, KvTarget()))).left == {}
        assert (lmcache.entries, len(vllm[1].cores[0].cache)) == ({}, 0)
        assert [await ask(adapter, salt=salt) for salt in (None, "s")] == [0, 0]

    @pytest.mark.parametrize("target", [TARGET, KvTarget(cache_salt="s")])
    async def test_no_part_of_it_can_be_flushed(self, lmcache, adapter, target):
        await adapter.connect()
        await ask(adapter, salt="s")
        with pytest.raises(NotSupported):
            await result(adapter.operate(KvVerb.FLUSH, target))
        assert lmcache.tiers(PROMPT, "s") == ["l1+l2"] * 4

    async def test_they_connect_by_themselves(self, adapter):
        assert (await result(adapter.operate(KvVerb.OFFLOAD, TARGET))).total == 0
