import asyncio
from array import array
from dataclasses import replace
from itertools import product

import pytest

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineUnavailable
from engine_adapter.lmcache import verbs
from engine_adapter.lmcache.verbs import KvMover, TimedPins, embeddings_of, is_under, salt_for, without_lora
from engine_adapter.types import KvProgress
from tests.engine_adapter.builders import body
from tests.engine_adapter.lmcache.conftest import PROMPT
from tests.fake_engines.lmcache import CHUNK_BYTES, Entry

LONG = array("i", range(64 * 200))  # 200 chunks: more than a slice


@pytest.fixture
def mover(node, site) -> KvMover:
    """Of an engine with two blocks in a chunk."""
    return KvMover(node, site, 2)


async def last(steps) -> KvProgress:
    """The result of an operation, whose progress never went back."""
    seen = [progress async for progress in steps]
    done = [(step.done, step.bytes) for step in seen]
    assert done == sorted(done)
    return seen[-1]


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the fake runs in a thread of its own
            await asyncio.sleep(0.001)


class TestOffload:
    async def test_what_lies_on_disk_leaves_memory(self, lmcache, mover):
        lmcache.store(PROMPT)
        assert await last(mover.offload(PROMPT, None)) == KvProgress(12, 12, 6 * CHUNK_BYTES)
        assert lmcache.tiers(PROMPT) == ["l2"] * 6
        assert await last(mover.offload(PROMPT, None)) == KvProgress(0, 0)

    async def test_nothing_is_dropped_before_it_is_written(self, lmcache, mover):
        lmcache.writes_through = False
        lmcache.store(PROMPT)
        offloading = asyncio.create_task(last(mover.offload(PROMPT, None)))
        await until(lambda: lmcache.statuses >= 3)
        assert lmcache.tiers(PROMPT) == ["l1"] * 6
        lmcache.write_through()
        assert (await offloading).done == 12
        assert lmcache.tiers(PROMPT) == ["l2"] * 6

    async def test_what_an_engine_has_just_computed_is_waited_for(self, lmcache, mover):
        lmcache.tells_at_once = False
        lmcache.store(PROMPT)
        lmcache.tell()
        lmcache.entries.update({name: Entry(l2=True) for name in lmcache.names(LONG[:128])})
        # The node has it, as many objects as its coordinator knows of; so it looks as if all were told.
        lmcache.evict(PROMPT[:128])
        offloading = asyncio.create_task(last(mover.offload(LONG[:128], None)))
        await until(lambda: lmcache.asked >= 2)
        lmcache.tell()
        assert (await offloading).done == 4

    async def test_what_cannot_be_written_stays(self, lmcache, mover, monkeypatch):
        monkeypatch.setattr(verbs, "_PATIENCE_S", 0.1)
        lmcache.store(PROMPT[:128])
        lmcache.writes_through = False
        lmcache.store(PROMPT)
        done = KvProgress(4, 12, 2 * CHUNK_BYTES, {"not_on_disk": 8})
        assert await last(mover.offload(PROMPT, None)) == done
        assert lmcache.tiers(PROMPT) == ["l2"] * 2 + ["l1"] * 4

    async def test_what_a_request_uses_stays(self, lmcache, mover):
        lmcache.store(PROMPT)
        lmcache.entries[lmcache.names(PROMPT)[1]].in_use = True
        assert await last(mover.offload(PROMPT, None)) == KvProgress(10, 12, 5 * CHUNK_BYTES, {"in_use": 2})
        assert lmcache.tiers(PROMPT)[:3] == ["l2", "l1+l2", "l2"]

    async def test_only_that_salt(self, lmcache, mover):
        salts = ("", "s", salt_for("s", "ada"), "st")
        for salt in salts:
            lmcache.store(PROMPT, salt)
        assert (await last(mover.offload(None, "s"))).done == 24
        assert [lmcache.tiers(PROMPT, salt)[0] for salt in salts] == ["l1+l2", "l2", "l2", "l1+l2"]

    async def test_everything_in_slices(self, lmcache, mover):
        lmcache.store(LONG)
        lmcache.store(PROMPT, "s")
        steps = [progress async for progress in mover.offload(None, None)]
        assert [step.done for step in steps] == [0, 128, 256, 384, 412]
        assert {step.total for step in steps} == {412}


class TestRestore:
    async def test_brings_to_memory_what_lies_on_disk_in_slices(self, lmcache, mover):
        lmcache.store(LONG)
        lmcache.evict(LONG)
        steps = [progress async for progress in mover.restore(LONG, None)]
        assert [step.done for step in steps] == [0, 128, 256, 384, 400]
        assert steps[-1] == KvProgress(400, 400, 200 * CHUNK_BYTES)
        assert lmcache.tiers(LONG) == ["l1+l2"] * 200

    async def test_what_lies_in_memory_is_left_alone(self, lmcache, mover):
        lmcache.store(PROMPT)
        assert await last(mover.restore(PROMPT, None)) == KvProgress(0, 0)
        assert lmcache.prefetches == []
        lmcache.evict(PROMPT[:128])
        assert await last(mover.restore(PROMPT, None)) == KvProgress(4, 4, 2 * CHUNK_BYTES)

    async def test_it_is_the_salts_own(self, lmcache, mover):
        lmcache.store(PROMPT, "s")
        lmcache.evict(PROMPT, salt="s")
        assert await last(mover.restore(PROMPT, None)) == KvProgress(0, 0)
        assert (await last(mover.restore(PROMPT, "s"))).done == 12

    async def test_what_does_not_come_back_is_told(self, lmcache, mover):
        lmcache.store(PROMPT)
        lmcache.evict(PROMPT)
        lmcache.lost = {name for name, _ in lmcache.names(PROMPT)[4:]}
        done = KvProgress(8, 12, 4 * CHUNK_BYTES, {"not_restored": 4})
        assert await last(mover.restore(PROMPT, None)) == done

    async def test_one_that_never_ends_is_given_up(self, lmcache, mover, monkeypatch):
        monkeypatch.setattr(verbs, "_PATIENCE_S", 0.1)
        lmcache.store(PROMPT)
        lmcache.evict(PROMPT)
        lmcache.polls = 1_000_000
        with pytest.raises(EngineUnavailable, match="did not finish a prefetch"):
            await last(mover.restore(PROMPT, None))


class TestFlush:
    async def test_nothing_is_left_of_the_model(self, lmcache, mover):
        lmcache.store(LONG)
        lmcache.evict(LONG[:640])
        lmcache.store(PROMPT, "s")
        assert (await last(mover.flush())).done == 412
        assert lmcache.entries == {}

    async def test_what_is_told_late_goes_too(self, lmcache, node, site):
        lmcache.tells_at_once, lmcache.tells_in = False, 3
        lmcache.store(PROMPT)
        await last(KvMover(node, replace(site, flush_s=0.4), 2).flush())
        assert lmcache.entries == {}

    async def test_what_a_request_uses_is_told(self, lmcache, mover):
        lmcache.store(PROMPT)
        lmcache.entries[lmcache.names(PROMPT)[1]].in_use = True
        assert (await last(mover.flush())).left == {"in_use": 2}

    async def test_what_the_coordinator_believes_in_vain_is_dropped_once(self, lmcache, mover):
        """Files that were deleted by hand: nobody tells the coordinator."""
        lmcache.store(PROMPT)
        lmcache.tells_at_once = False
        lmcache.entries.clear()
        for entry in lmcache.told.values():
            entry.l1 = False
        assert await last(mover.flush()) == KvProgress(12, 12, 6 * CHUNK_BYTES)

    async def test_nothing_to_flush(self, mover):
        assert [progress async for progress in mover.flush()] == []


async def test_a_pin_ends_when_its_time_is_up(lmcache, coordinator, scope):
    held = TimedPins()
    await held.add(coordinator, scope, PROMPT, "s", 0.05)
    assert (len(held), len(lmcache.pins)) == (1, 6)
    await until(lambda: not held and not lmcache.pins)


async def test_a_pin_can_be_ended_before_and_once(lmcache, coordinator, scope):
    held = TimedPins()
    pin_id = await held.add(coordinator, scope, PROMPT, "s", 60)
    other = await held.add(coordinator, scope, PROMPT, "s", 60)
    assert set(lmcache.pins.values()) == {2}
    assert await held.remove(pin_id)
    assert not await held.remove(pin_id)
    assert (len(held), set(lmcache.pins.values())) == (1, {1})
    assert await held.remove(other)
    assert lmcache.pins == {}


async def test_the_end_is_tried_until_it_is_heard(lmcache, coordinator, scope, monkeypatch):
    monkeypatch.setattr(verbs, "_RETRY_S", 0.02)
    held = TimedPins()
    lmcache_error = await held.add(coordinator, scope, PROMPT, "", 0.02)
    lmcache.coordinator_error = 503
    await asyncio.sleep(0.1)
    assert len(held) == 1
    with pytest.raises(EngineUnavailable):
        await held.remove(lmcache_error)
    lmcache.coordinator_error = None
    await until(lambda: not held and not lmcache.pins)


async def test_closing_ends_all_and_does_not_wait_for_a_coordinator_that_is_gone(lmcache, coordinator, scope):
    held = TimedPins()
    for salt in ("s", "t"):
        await held.add(coordinator, scope, PROMPT, salt, 60)
    await held.aclose()
    assert lmcache.pins == {}
    await held.add(coordinator, scope, PROMPT, "", 60)
    lmcache.coordinator_error = 503
    await held.aclose()
    assert len(held) == 0


TENANT = "kvpin-" + "0" * 32 + "-" + "1" * 32  # kvpin's own are as long as this


@pytest.mark.parametrize("salt", [None, "s", TENANT, "ünï cøde"])
def test_text_without_an_adapter_keeps_its_salt(salt):
    assert salt_for(salt) == salt


def test_no_two_kinds_of_kv_share_a_salt():
    salts = (None, "s", "t", TENANT, "a/b", "a@b", "a\\b", "a\0b", "x" * 128, "~" * 33)
    adapters = (None, "ada", "lin", "s", "")
    embeddings = (None, "e1", "e2", "ada")
    sent = [salt_for(*kind) for kind in product(salts, adapters, embeddings)]
    assert len(set(sent)) == len(sent)
    # A client's own salt that looks like one made here is another's all the same.
    assert not {salt_for(made) for made in sent if made and "~" in made} & set(sent)


def test_every_salt_is_one_that_lmcache_takes():
    for salt in ("a/b", "a@b", "a\\b", "a\0b", "x" * 129, "x" * 128, "~", TENANT, "x" * 95):
        sent = salt_for(salt, "an adapter", "embeddings")
        assert len(sent) <= 128
        assert not set("@/\\\0") & set(sent)


@pytest.mark.parametrize("salt", [None, "s", TENANT])
def test_what_vllm_tells_of_is_the_requests_own(salt):
    assert without_lora(salt_for(salt, "ada"), "ada") == salt
    assert without_lora(salt, None) == salt
    assert without_lora(salt, "ada") == salt
    assert without_lora(salt_for(salt, "lin"), "ada") == salt_for(salt, "lin")


def test_a_salt_is_found_with_all_its_adapters():
    for adapter in (None, "ada"):
        assert is_under(salt_for("s", adapter), "s")
        assert is_under(salt_for("a/b", adapter), "a/b")
        assert not is_under(salt_for("st", adapter), "s")
        assert not is_under(salt_for(None, adapter) or "", "s")


def test_embeddings_are_told_apart():
    one, two = (embeddings_of(body(model="m", prompt_embeds=text)) for text in ("QQ==", "Qg=="))
    assert None not in (one, two)
    assert one != two
    assert one == embeddings_of(body(prompt_embeds="QQ==", temperature=0))
    several = [embeddings_of(body(prompt_embeds=texts)) for texts in (["QQ==", "Qg=="], ["QQ==Qg=="])]
    assert several[0] != several[1]


def test_embeddings_within_messages_are_those_of_the_very_same_request():
    def chat(data):
        return body(messages=[{"role": "user", "content": [{"type": "prompt_embeds", "data": data}]}])

    assert embeddings_of(chat("QQ==")) not in (None, embeddings_of(chat("Qg==")))


def test_embeddings_are_seen_however_they_are_written():
    raw = body(messages=[{"content": [{"type": "prompt_embeds", "data": "QQ=="}]}]).raw
    assert embeddings_of(JsonBody(raw.replace(b"prompt_embeds", b"prompt\\u005fembeds"))) is not None
    assert embeddings_of(body(messages=[{"content": "\0"}])) is None


@pytest.mark.parametrize(
    "fields", [{"prompt": 'say "prompt_embeds"'}, {"prompt": "x", "prompt_embeds": None}]
)
def test_text_has_none(fields):
    assert embeddings_of(body(**fields)) is None
