import asyncio
import dataclasses
from array import array

import pytest
from msgspec.structs import replace

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.lmcache import LmCache, tiers, verbs
from engine_adapter.lmcache.salts import salt_for
from engine_adapter.types import BelowGpu, Capability, KvTarget, KvVerb, Pinned
from tests.engine_adapter.lmcache.conftest import PROMPT, WHOLE, spec_of
from tests.engines import engine_spec
from tests.fake_engines.text import MODEL_DIR

TARGET = KvTarget(PROMPT)
NOTHING = BelowGpu(0, 0, 0)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine may answer a look-up late; that is not tested here."""
    monkeypatch.setattr(tiers, "_LOOKUP_S", 10.0)


@pytest.fixture
async def lower(lmcache):
    lower = LmCache(spec_of(lmcache))
    await lower.connect(str(MODEL_DIR), 32)
    yield lower
    await lower.aclose()


async def result(steps):
    return [progress async for progress in steps][-1]


def test_an_engine_without_lmcache_has_none():
    with pytest.raises(ValueError, match="names no LMCache"):
        LmCache(engine_spec("vllm", "http://127.0.0.1:1", "v"))


class TestWhatItIs:
    async def test_declares_what_both_can_do(self, lower):
        assert lower.capabilities == {Capability.OFFLOAD, Capability.RESTORE, Capability.PIN}
        assert (lower.tokens_per_chunk, lower.findings) == (64, ())

    async def test_nothing_before_it_was_asked_nor_when_it_is_gone(self, lmcache):
        lower = LmCache(spec_of(lmcache))
        assert (lower.capabilities, lower.tokens_per_chunk, lower.findings) == (frozenset(), None, ())
        with pytest.raises(EngineUnavailable, match="not asked yet"):
            await result(lower.operate(KvVerb.OFFLOAD, TARGET))
        assert await lower.lookup(TARGET) is None
        assert await lower.stats() == {}
        lmcache.node_error = 503
        await lower.connect(str(MODEL_DIR), 32)
        assert (lower.capabilities, lower.tokens_per_chunk) == (frozenset(), None)
        (finding,) = lower.findings
        assert await lower.stats() == {"error": str(finding)}
        with pytest.raises(EngineUnavailable, match="is not reachable"):
            await lower.pin(TARGET, 1.0)
        await lower.aclose()

    @pytest.mark.parametrize("which", ["node_error", "coordinator_error"])
    async def test_tells_when_it_goes_and_comes(self, lmcache, lower, which):
        assert not await lower.has_changed()
        setattr(lmcache, which, 503)
        assert await lower.has_changed()
        await lower.connect(str(MODEL_DIR), 32)
        assert lower.capabilities == frozenset()
        assert not await lower.has_changed()
        setattr(lmcache, which, None)
        assert await lower.has_changed()
        await lower.connect(str(MODEL_DIR), 32)
        assert (len(lower.capabilities), lower.findings) == (3, ())

    async def test_tells_when_something_else_is_amiss(self, lmcache, lower):
        lmcache.node_error = 503
        await lower.connect(str(MODEL_DIR), 32)
        lmcache.node_error = None
        lmcache.options = dataclasses.replace(lmcache.options, connected=False)
        assert await lower.has_changed()

    async def test_one_that_hangs_is_gone(self, lower, monkeypatch):
        async def hang():
            await asyncio.sleep(60)

        monkeypatch.setattr(tiers, "_CHECK_S", 0.05)
        monkeypatch.setattr(lower._node, "check", hang)
        assert await lower.has_changed()

    async def test_another_coordinator_can_be_named(self, lmcache, start_lmcache):
        other = start_lmcache()
        other.store(PROMPT)
        lower = LmCache(spec_of(lmcache, lmcache_coordinator=other.coordinator_url))
        await lower.connect(str(MODEL_DIR), 32)
        assert (await lower.lookup(TARGET)).host == WHOLE
        await lower.aclose()

    async def test_stats_are_for_people(self, lmcache, lower):
        lmcache.store(PROMPT)
        lmcache.evict(PROMPT[:128])
        await lower.pin(TARGET, 60)
        stats = await lower.stats()
        assert stats["l1"]["objects"] == 4
        assert {name: known["objects"] for name, known in stats["directory"].items()} == {"l1": 4, "l2": 6}
        assert stats["pins"] == {"own": 1, "objects": 6}


class TestLookup:
    async def test_where_a_prompt_lies(self, lmcache, lower):
        assert await lower.lookup(TARGET) == NOTHING
        lmcache.store(PROMPT)
        assert await lower.lookup(TARGET) == BelowGpu(WHOLE, 0, WHOLE)
        lmcache.evict(PROMPT[:256])
        assert await lower.lookup(TARGET) == BelowGpu(0, WHOLE, WHOLE)
        assert await lower.lookup(KvTarget(PROMPT[:256])) == BelowGpu(0, 256, 255)

    async def test_under_another_salt_or_adapter_it_lies_nowhere(self, lmcache, lower):
        lmcache.store(PROMPT)
        assert await lower.lookup(replace(TARGET, cache_salt="s")) == NOTHING
        assert await lower.lookup(replace(TARGET, lora="ada")) == NOTHING
        lmcache.store(PROMPT, salt_for("s", "ada"), "ada")
        assert (await lower.lookup(replace(TARGET, cache_salt="s", lora="ada"))).cached == WHOLE

    async def test_no_more_than_the_text_before_an_image(self, lmcache, lower):
        lmcache.store(PROMPT)
        marks = array("Q", bytes(8 * len(PROMPT)))
        marks[200] = 7
        assert (await lower.lookup(replace(TARGET, extra_ids=marks))).cached == 192
        marks[3] = 7
        asked = lmcache.asked
        assert await lower.lookup(replace(TARGET, extra_ids=marks)) == NOTHING
        assert lmcache.asked == asked

    async def test_everything_is_no_prompt(self, lower):
        assert await lower.lookup(KvTarget()) is None

    async def test_one_that_fails_is_the_last_until_all_is_well(self, lmcache, lower):
        lmcache.store(PROMPT)
        lmcache.coordinator_error = 500
        assert await lower.lookup(TARGET) is None
        lmcache.coordinator_error = None
        asked = lmcache.asked
        assert await lower.lookup(TARGET) is None
        assert lmcache.asked == asked
        assert not await lower.has_changed()
        assert (await lower.lookup(TARGET)).cached == WHOLE

    async def test_one_that_takes_too_long_is_not_waited_for(self, lmcache, lower, monkeypatch):
        monkeypatch.setattr(tiers, "_LOOKUP_S", 0.0)
        monkeypatch.setattr(tiers, "_LOOKUP_TOK_S", float("inf"))
        assert await lower.lookup(TARGET) is None


class TestOperations:
    async def test_down_and_up(self, lmcache, lower):
        lmcache.store(PROMPT)
        assert (await result(lower.operate(KvVerb.OFFLOAD, TARGET))).done == 12
        assert lmcache.tiers(PROMPT) == ["l2"] * 6
        assert (await result(lower.operate(KvVerb.RESTORE, TARGET))).done == 12
        assert lmcache.tiers(PROMPT) == ["l1+l2"] * 6

    async def test_of_an_adapter(self, lmcache, lower):
        lmcache.store(PROMPT)
        lmcache.store(PROMPT, salt_for(None, "ada"), "ada")
        await result(lower.operate(KvVerb.OFFLOAD, replace(TARGET, lora="ada")))
        assert lmcache.tiers(PROMPT) == ["l1+l2"] * 6
        assert lmcache.tiers(PROMPT, salt_for(None, "ada")) == ["l2"] * 6

    async def test_all_of_it(self, lmcache, lower):
        lmcache.store(PROMPT)
        assert (await result(lower.operate(KvVerb.OFFLOAD, KvTarget()))).done == 12
        assert (await result(lower.operate(KvVerb.FLUSH, KvTarget()))).done == 12
        assert lmcache.entries == {}

    async def test_what_is_restored_is_a_prompt(self, lower):
        with pytest.raises(EngineRejected, match="name its messages, prompt or token_ids") as caught:
            await result(lower.operate(KvVerb.RESTORE, KvTarget(cache_salt="s")))
        assert caught.value.status == 400

    async def test_pins_what_lies_on_disk(self, lmcache, lower):
        assert await lower.pin(TARGET, 5.0) == Pinned("", 0, 5.0)
        assert not await lower.unpin("")
        lmcache.store(PROMPT[:192], "s")
        pinned = await lower.pin(replace(TARGET, cache_salt="s"), 5.0)
        assert (pinned.blocks, pinned.ttl_s) == (6, 5.0)
        assert set(lmcache.pins) == set(lmcache.names(PROMPT[:192], "s"))
        assert await lower.unpin(pinned.pin_id)
        assert lmcache.pins == {}

    async def test_no_more_than_lies_there_without_a_gap(self, lmcache, lower, monkeypatch):
        monkeypatch.setattr(verbs, "_PATIENCE_S", 0.05)
        lmcache.store(PROMPT[:128])
        lmcache.writes_through = False
        lmcache.store(PROMPT)
        assert (await lower.pin(TARGET, 5.0)).blocks == 4
        marks = array("Q", bytes(8 * len(PROMPT)))
        marks[0] = 1
        assert (await lower.pin(replace(TARGET, extra_ids=marks), 5.0)).blocks == 0
