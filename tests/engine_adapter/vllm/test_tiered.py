"""vLLM over LMCache, both fake, on real sockets: its adapter, and kvpin in front of it."""

import asyncio
import dataclasses
import json
from array import array
from contextlib import aclosing
from unittest.mock import AsyncMock

import httpx
import pytest
from msgspec.structs import replace

from engine_adapter import EngineRejected, EngineSpecError, NotSupported, make_adapter
from engine_adapter.lmcache import verbs
from engine_adapter.lmcache.verbs import salt_for
from engine_adapter.types import (
    BelowGpu,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Capability,
    KvTarget,
    KvVerb,
    Pinned,
    Tier,
    ViewCurrent,
)
from engine_adapter.vllm import tiered
from tests.engine_adapter.builders import body
from tests.engines import engine_spec
from tests.fake_engines.lmcache import running_lmcache, running_tiered_vllm

PROMPT = array("i", range(300, 600))  # four chunks of 64, and a rest
TARGET = KvTarget(PROMPT)
COMPLETIONS = "/v1/completions"
ADA = "ada\0/ada"  # the adapter and its path
NOTHING = BelowGpu(0, 0, 0)
MOVES = {Capability.OFFLOAD, Capability.RESTORE, Capability.PIN}


@pytest.fixture(scope="module")
def servers():
    with running_lmcache() as lmcache, running_tiered_vllm(lmcache, block_size=32, loras=("ada",)) as vllm:
        yield lmcache, vllm


@pytest.fixture
def lmcache(servers):
    servers[0].reset()
    return servers[0]


@pytest.fixture
def vllm(servers):
    """Its address and the fake, with nothing on its GPU: two blocks in a chunk, and a LoRA adapter."""
    servers[1][1].restart()
    return servers[1]


@pytest.fixture
def adapter(make, lmcache, vllm):
    return make("vllm", vllm[0], lmcache=lmcache.url)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine may answer a look-up late; that is not tested here."""
    monkeypatch.setattr(tiered, "_LOOKUP_S", 10.0)
    monkeypatch.setattr(tiered, "_CHECK_S", 10.0)


async def result(steps):
    async with aclosing(steps):
        return [progress async for progress in steps][-1]


async def ask(adapter, *, salt=None, model="tiny"):
    """A request as kvpin sends it; the tokens the engine reused."""
    salted = {} if salt is None else {"cache_salt": salt}
    asked = body(model=model, prompt=list(PROMPT), max_tokens=1, **salted)
    target = KvTarget(PROMPT, cache_salt=salt, lora=model if model != "tiny" else None)
    async with adapter.hold(COMPLETIONS, asked, target) as hold:
        request = adapter.prepare("POST", COMPLETIONS, {"content-type": "application/json"}, hold.body)
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(request.url, content=request.body, headers=dict(request.headers))
    return answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"lmcache_coordinator": "http://h:3"}, "lmcache_coordinator goes with lmcache="),
        ({"lmcache": "h:2"}, "is not an http:// or https:// address"),
    ],
)
def test_wrong_options_are_named(option, message):
    with pytest.raises(EngineSpecError, match=message):
        make_adapter(engine_spec("vllm", "http://h:1", "v", **option))


class TestWhatItIs:
    async def test_without_it_the_rest_goes_on(self, lmcache, adapter):
        info = await adapter.connect()
        assert (info.capabilities >= MOVES, info.tokens_per_chunk, adapter.findings()) == (True, 64, ())
        assert not (await adapter.load()).outdated
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

    async def test_its_coordinator_goes_and_comes(self, lmcache, adapter):
        await adapter.connect()
        lmcache.coordinator_error = 503
        assert (await adapter.load()).outdated
        assert not (await adapter.connect()).capabilities & MOVES
        assert not (await adapter.load()).outdated
        lmcache.coordinator_error = None
        assert (await adapter.load()).outdated
        assert (await adapter.connect()).capabilities >= MOVES

    async def test_something_else_that_is_amiss_is_told(self, lmcache, adapter):
        lmcache.node_error = 503
        await adapter.connect()
        lmcache.node_error = None
        lmcache.options = dataclasses.replace(lmcache.options, connected=False)
        assert (await adapter.load()).outdated

    async def test_one_that_hangs_is_gone(self, adapter, monkeypatch):
        await adapter.connect()
        monkeypatch.setattr(tiered, "_CHECK_S", 0.05)
        monkeypatch.setattr(adapter._node, "check", asyncio.Event().wait)
        assert (await adapter.load()).outdated

    async def test_another_coordinator_can_be_named(self, make, lmcache, vllm):
        with running_lmcache() as other:
            other.store(PROMPT)
            named = {"lmcache": lmcache.url, "lmcache_coordinator": other.coordinator_url}
            adapter = make("vllm", vllm[0], **named)
            await adapter.connect()
            assert (await adapter.lookup(TARGET)).host == 256

    async def test_stats_have_both(self, lmcache, adapter):
        assert (await adapter.stats())["lmcache"] == {}
        await adapter.connect()
        await ask(adapter)
        lmcache.evict(PROMPT[:128])
        await adapter.pin(TARGET, 60)
        stats = await adapter.stats()
        below = stats["lmcache"]
        assert below["l1"]["objects"] == 2
        assert {name: known["objects"] for name, known in below["directory"].items()} == {"l1": 2, "l2": 4}
        assert below["pins"] == {"own": 1, "objects": 4}
        assert stats["prefix_cache"]["queried_tokens"] >= len(PROMPT)
        lmcache.node_error = 500
        assert "error" in (await adapter.stats())["lmcache"]

    async def test_adapters_that_cannot_be_kept_apart_are_a_finding(self, make, lmcache):
        with running_tiered_vllm(lmcache, loras=("ada",), knows_salts=False) as (url, _):
            adapter = make("vllm", url, lmcache=lmcache.url)
            await adapter.connect()
            assert "takes no cache_salt" in adapter.findings()[-1].problem

    async def test_without_its_address_it_is_a_finding(self, make, vllm):
        adapter = make("vllm", vllm[0])
        await adapter.connect()
        assert "lmcache=http://HOST:PORT" in adapter.findings()[0].remedy


class TestLookup:
    async def test_where_a_prompt_lies(self, lmcache, adapter):
        assert await adapter.lookup(TARGET) is None
        await adapter.connect()
        assert await adapter.lookup(KvTarget()) is None
        assert await adapter.lookup(TARGET) == NOTHING
        lmcache.store(PROMPT)
        assert await adapter.lookup(TARGET) == BelowGpu(256, 0, 256)
        lmcache.evict(PROMPT[:128])
        assert await adapter.lookup(TARGET) == BelowGpu(0, 256, 256)
        assert await adapter.lookup(KvTarget(PROMPT[:128])) == BelowGpu(0, 128, 127)

    async def test_under_another_salt_or_adapter_it_lies_nowhere(self, lmcache, adapter):
        await adapter.connect()
        lmcache.store(PROMPT)
        assert await adapter.lookup(replace(TARGET, cache_salt="s")) == NOTHING
        assert await adapter.lookup(replace(TARGET, lora="ada")) == NOTHING
        lmcache.store(PROMPT, salt_for("s", ADA), "ada")
        assert (await adapter.lookup(replace(TARGET, cache_salt="s", lora="ada"))).cached == 256

    async def test_no_more_than_the_text_before_an_image(self, lmcache, adapter):
        await adapter.connect()
        lmcache.store(PROMPT)
        marks = array("Q", bytes(8 * len(PROMPT)))
        marks[200] = 7
        assert (await adapter.lookup(replace(TARGET, extra_ids=marks))).cached == 192
        marks[3] = 7
        asked = lmcache.asked
        assert await adapter.lookup(replace(TARGET, extra_ids=marks)) == NOTHING
        assert lmcache.asked == asked

    async def test_one_that_fails_is_the_last_until_all_is_well(self, lmcache, adapter):
        await adapter.connect()
        lmcache.store(PROMPT)
        lmcache.coordinator_error = 500
        assert await adapter.lookup(TARGET) is None
        lmcache.coordinator_error = None
        asked = lmcache.asked
        assert await adapter.lookup(TARGET) is None
        assert lmcache.asked == asked
        assert not (await adapter.load()).outdated
        assert (await adapter.lookup(TARGET)).cached == 256

    async def test_one_that_comes_back_as_another_is_told_until_it_is_met(self, lmcache, adapter):
        """The check that finds it may fail for another reason, and then tells nothing."""
        await adapter.connect()
        lmcache.coordinator_error = 500
        assert await adapter.lookup(TARGET) is None
        lmcache.coordinator_error = None
        other = {"chunk_size": 128, "coordinator_chunk": 128}
        lmcache.options = dataclasses.replace(lmcache.options, **other)
        assert [(await adapter.load()).outdated for _ in range(2)] == [True, True]
        assert (await adapter.connect()).tokens_per_chunk == 128
        assert not (await adapter.load()).outdated

    async def test_one_that_takes_too_long_is_not_waited_for(self, adapter, monkeypatch):
        await adapter.connect()
        monkeypatch.setattr(tiered, "_LOOKUP_S", 0.0)
        monkeypatch.setattr(tiered, "_LOOKUP_TOK_S", float("inf"))
        assert await adapter.lookup(TARGET) is None


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
        assert sent == [None, salt_for(None, ADA), "s", salt_for("s", ADA)]

    async def test_an_adapter_from_another_path_is_another(self, lmcache, vllm, adapter, monkeypatch):
        await adapter.connect()
        assert [await ask(adapter, model="ada") for _ in range(2)] == [0, 288]
        models = await adapter._control.get("/v1/models")
        models["data"][-1]["root"] = "/v2"
        monkeypatch.setattr(adapter._control, "get", AsyncMock(return_value=models))
        vllm[1].restart()  # its GPU holds nothing: what it reuses comes from LMCache
        await adapter.connect()
        target = replace(TARGET, lora="ada")
        assert await adapter.lookup(target) == NOTHING
        assert await ask(adapter, model="ada") == 0
        assert (await adapter.lookup(target)).cached == 256

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
        sent = adapter.prepare("POST", path, {}, body(model="ada", prompt="x"))
        assert json.loads(sent.body)["cache_salt"] == salt_for(None, ADA)

    async def test_embeddings_are_kept_apart(self, adapter):
        assert not (await adapter.connect()).renders_embeds
        sent = [
            adapter.prepare("POST", COMPLETIONS, {}, body(model="tiny", prompt_embeds=data)).body
            for data in ("QQ==", "Qg==", "QQ==")
        ]
        salts = [json.loads(each)["cache_salt"] for each in sent]
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
        given = body(**fields)
        assert adapter.prepare("POST", path, {}, given).body == given.raw
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

    async def test_what_is_told_of_tiers_below_could_be_anybodys(self, adapter):
        stored = BlocksStored(Tier.HOST, None, (b"1",), PROMPT[:64], 64)
        assert adapter._of_gpu(stored) is None
        assert adapter._of_gpu(BlocksRemoved(Tier.HOST, (b"1",))) is None
        for event in (replace(stored, tier=Tier.GPU), BlocksRemoved(Tier.GPU, (1,)), CacheCleared()):
            assert adapter._of_gpu(event) == event


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
        assert adapter.holds_pin(pinned.pin_id)
        assert await adapter.unpin(pinned.pin_id)
        assert not adapter.holds_pin(pinned.pin_id)

    async def test_of_an_adapter(self, lmcache, adapter):
        await adapter.connect()
        lmcache.store(PROMPT)
        lmcache.store(PROMPT, salt_for(None, ADA), "ada")
        await result(adapter.operate(KvVerb.OFFLOAD, replace(TARGET, lora="ada")))
        assert lmcache.tiers(PROMPT) == ["l1+l2"] * 4
        assert lmcache.tiers(PROMPT, salt_for(None, ADA)) == ["l2"] * 4
        assert (await result(adapter.operate(KvVerb.OFFLOAD, KvTarget()))).done == 8

    async def test_what_is_restored_is_a_prompt(self, adapter):
        with pytest.raises(EngineRejected, match="name its messages, prompt or token_ids") as caught:
            await result(adapter.operate(KvVerb.RESTORE, KvTarget(cache_salt="s")))
        assert caught.value.status == 400

    async def test_pins_what_lies_on_disk(self, lmcache, adapter):
        assert await adapter.pin(TARGET, 5.0) == Pinned("", 0, 5.0)
        assert not await adapter.unpin("")
        lmcache.store(PROMPT[:192], "s")
        pinned = await adapter.pin(replace(TARGET, cache_salt="s"), 5.0)
        assert (pinned.blocks, pinned.ttl_s) == (6, 5.0)
        assert set(lmcache.pins) == set(lmcache.names(PROMPT[:192], "s"))

    async def test_pins_no_more_than_lies_there_without_a_gap(self, lmcache, adapter, monkeypatch):
        monkeypatch.setattr(verbs, "_PATIENCE_S", 0.05)
        lmcache.store(PROMPT[:128])
        lmcache.writes_through = False
        lmcache.store(PROMPT)
        assert (await adapter.pin(TARGET, 5.0)).blocks == 4
        marks = array("Q", bytes(8 * len(PROMPT)))
        marks[0] = 1
        assert (await adapter.pin(replace(TARGET, extra_ids=marks), 5.0)).blocks == 0

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
