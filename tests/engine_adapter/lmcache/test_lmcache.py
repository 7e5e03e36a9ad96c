"""An LMCache on real sockets, without the engine above it: its client, its verbs, its salts."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product

import pytest

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineUnavailable
from engine_adapter.lmcache import client, verbs
from engine_adapter.lmcache.client import (
    Coordinator,
    Key,
    KeyPlacements,
    KvChunk,
    LmCacheNode,
    LmCacheSite,
    ObjectPlace,
    Scope,
    below_gpu,
    chunks_of,
    survey,
)
from engine_adapter.lmcache.verbs import KvMover, TimedPins, embeddings_of, is_under, salt_for, without_lora
from engine_adapter.types import BelowGpu, Capability, EngineSpec, KvProgress
from tests.engine_adapter.builders import body
from tests.engines import engine_spec
from tests.fake_engines.lmcache import CHUNK_BYTES, Entry, FakeLmCache, running_lmcache
from tests.fake_engines.text import MODEL_DIR

PROMPT = array("i", range(100, 500))  # six chunks of 64, and a rest
WHOLE = 384


@pytest.fixture(scope="session")
def shared_lmcache() -> Iterator[FakeLmCache]:
    with running_lmcache() as lmcache:
        yield lmcache


@pytest.fixture
def lmcache(shared_lmcache) -> FakeLmCache:
    shared_lmcache.reset()
    return shared_lmcache


def spec_of(server: FakeLmCache, **fields: str) -> EngineSpec:
    return engine_spec("vllm", "http://127.0.0.1:1", "v", **{"lmcache": server.url} | fields)


@pytest.fixture
async def node(lmcache) -> AsyncIterator[LmCacheNode]:
    node = LmCacheNode(spec_of(lmcache), lmcache.url)
    yield node
    await node.aclose()


@pytest.fixture
async def coordinator(lmcache) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(spec_of(lmcache), lmcache.coordinator_url)
    yield coordinator
    await coordinator.aclose()


@pytest.fixture
def scope(lmcache) -> Scope:
    options = lmcache.options
    return Scope(options.model, options.world_size, options.instance)


@pytest.fixture
def site(lmcache, coordinator, scope) -> LmCacheSite:
    return LmCacheSite(coordinator, scope, lmcache.options.chunk_size, lmcache.options.flush_s, frozenset())


async def test_a_node_that_cannot_delete_says_why(node, monkeypatch):
    async def refuse(*_args, **_kwargs):
        return b'{"deleted": 0, "skipped": 0, "ok": false, "error": "the disk is read-only"}'

    monkeypatch.setattr(node._control, "fetch", refuse)
    with pytest.raises(EngineUnavailable, match="could not delete: the disk is read-only"):
        await node.delete([], "all")


async def test_a_coordinator_tells_where_things_lie(lmcache, coordinator, scope, monkeypatch):
    lmcache.store(PROMPT)
    lmcache.store(PROMPT[:128], "salt")
    await coordinator.check()
    assert await coordinator.instances() == {"node-a"}
    assert (await coordinator.stats()).l1_count == 8
    assert (await coordinator.lookup(scope, PROMPT, "salt")).chunks == 6
    monkeypatch.setattr(client, "_PAGE", 3)
    keys = [each.key for each in await coordinator.keys()]
    assert len({(key.chunk_hash_hex, key.cache_salt) for key in keys}) == len(keys) == 8


@pytest.mark.parametrize(("pending", "in_flight", "is_storing"), [(0, 0, False), (3, 0, True), (0, 1, True)])
def test_whether_a_node_is_about_to_write(pending, in_flight, is_storing):
    stores = {"_default": client.Storing(), "other": client.Storing(pending, in_flight)}
    assert client.Storage({}, stores, 1).is_storing is is_storing


def chunk(tiers: str) -> KvChunk:
    return KvChunk((), "h" in tiers, "d" in tiers, 100)


def objects(name: str, *tiers: str, instance="a", shared=False, salt="") -> KeyPlacements:
    places = [ObjectPlace(instance, tier, 100, shared) for tier in tiers]
    return KeyPlacements(Key(name, "m", 0, cache_salt=salt), places)


@pytest.mark.parametrize(
    ("tiers", "n_tokens", "expected"),
    [
        ([], 100, BelowGpu(0, 0, 0)),
        (["hd", "hd", ""], 200, BelowGpu(128, 0, 128)),
        (["h", "d", "hd"], 200, BelowGpu(64, 128, 192)),
        (["", "hd"], 200, BelowGpu(0, 0, 0)),
        (["d", "d"], 128, BelowGpu(0, 128, 127)),  # of a prompt held whole, the last token is computed again
        (["hd", "d"], 129, BelowGpu(64, 64, 128)),
    ],
)
def test_what_an_engine_takes_of_a_prompt(tiers, n_tokens, expected):
    assert below_gpu([chunk(each) for each in tiers], n_tokens, 64) == expected


def test_a_chunk_lies_where_the_objects_of_all_ranks_do():
    found = chunks_of([objects("x", "l1", "l2"), objects("x", "l2"), objects("y", "l1")], "a")
    lies = [(each.on_host, each.on_disk, len(each.keys), each.bytes) for each in found]
    assert lies == [(False, True, 2, 200), (True, False, 1, 100)]
    assert len(chunks_of([objects("x", "l1"), objects("x", "l1", salt="s")], "a")) == 2


@pytest.mark.parametrize(
    ("instance", "shared", "held"), [("a", False, True), ("b", False, False), ("b", True, True)]
)
def test_what_other_nodes_hold_counts_where_it_is_shared(instance, shared, held):
    (found,) = chunks_of([objects("x", "l2", instance=instance, shared=shared)], "a")
    assert found.held is held


MOVES = {Capability.OFFLOAD, Capability.RESTORE}


@asynccontextmanager
async def surveyed(spec: EngineSpec, model: str = str(MODEL_DIR)):
    """What a survey comes to; of what was found, the problem and the remedy as one text."""
    node, made = LmCacheNode(spec, spec.options.lmcache), {}
    found = await survey(spec, model, node, lambda url: made.setdefault(url, Coordinator(spec, url)))
    yield found[0], [str(finding) for finding in found[1]]
    for each in (node, *made.values()):
        await each.aclose()


async def test_all_is_there(lmcache):
    async with surveyed(spec_of(lmcache)) as (site, findings):
        assert findings == []
        assert site.capabilities == MOVES | {Capability.PIN}
        assert (site.tokens_per_chunk, site.flush_s) == (64, lmcache.options.flush_s)
        assert (site.scope.instance_id, site.scope.world_size) == ("node-a", 1)
        # The node's own coordinator, unless another one is named.
        assert site.coordinator.url == lmcache.coordinator_url


async def test_a_model_on_gpus_spread_over_ranks_has_more_to_its_name():
    """Engines on GPUs are listed apart."""
    spread = f"{MODEL_DIR}##lmcache-dcp-layout-v1-d2-interleave1"
    with running_lmcache(on_gpu=True, world_size=2, model=spread) as server:
        async with surveyed(spec_of(server)) as (site, findings):
            pass
    assert (site.scope.model_name, site.scope.world_size, findings) == (spread, 2, [])


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        ({"connected": False}, "no vLLM of", '"kv_connector":"LMCacheMPConnector"'),
        ({"model": "/other"}, "only: /other", "--kv-transfer-config"),
        ({"l2": False}, "has no L2", "--l2-adapter"),
        ({"reporting": False}, "reports to no coordinator", "--coordinator-event-reporting"),
        ({"registered": False}, "does not know the server", "--coordinator-url"),
        ({"coordinator_chunk": 256}, "chunks of another size", "--chunk-size 64"),
        ({"coordinator_chunk": 32}, "chunks of another size", "--chunk-size 64"),
    ],
)
async def test_what_is_missing_is_named_with_the_flag_that_mends_it(options, problem, remedy):
    with running_lmcache(**options) as server:
        async with surveyed(spec_of(server)) as (site, (finding,)):
            assert site is None
            assert problem in finding
            assert remedy in finding
            assert "kvpin does not use it" in finding


async def test_without_pins_the_rest_can_be_used():
    with running_lmcache(pins=False) as server:
        async with surveyed(spec_of(server)) as (site, (finding,)):
            assert site.capabilities == MOVES
            assert "cannot pin" in finding


async def test_either_may_not_be_there(lmcache):
    nobody = "http://127.0.0.1:1"
    async with surveyed(spec_of(lmcache, lmcache=nobody)) as (site, (finding,)):
        assert (site, "is not reachable" in finding) == (None, True)
        assert nobody in finding
    async with surveyed(spec_of(lmcache, lmcache_coordinator=nobody)) as (site, (finding,)):
        assert (site, "coordinator http://127.0.0.1:1 is not reachable" in finding) == (None, True)


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

    async def test_what_an_engine_has_just_computed_is_waited_for(self, lmcache, node, site):
        mover = KvMover(node, replace(site, flush_s=1.0), 2)  # so long that a busy machine asks again
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

    async def test_a_coordinator_that_counts_otherwise_is_not_waited_for(self, lmcache, mover):
        lmcache.tells_at_once = False
        lmcache.store(PROMPT)
        async with asyncio.timeout(30):
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
    assert await asyncio.gather(held.remove(pin_id), held.remove(pin_id)) == [True, True]
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


class TestCallersThatLeave:
    """The coordinator has done what was asked, and its answer is on its way."""

    @pytest.fixture
    def answer_of(self, coordinator, monkeypatch):
        """Holds up answers: has one begun, and may they come."""

        def answer_of(method):
            done, go, ask = asyncio.Event(), asyncio.Event(), getattr(coordinator, method)

            async def held_up(*args):
                result = await ask(*args)
                done.set()
                await go.wait()
                return result

            monkeypatch.setattr(coordinator, method, held_up)
            return done, go

        return answer_of

    async def test_their_pin_ends_when_its_time_is_up(self, lmcache, coordinator, scope, answer_of):
        held, (done, go) = TimedPins(), answer_of("pin")
        adding = asyncio.create_task(held.add(coordinator, scope, PROMPT, "s", 0.05))
        await done.wait()
        adding.cancel()
        await asyncio.wait({adding})
        go.set()
        assert len(lmcache.pins) == 6
        await until(lambda: not lmcache.pins)

    async def test_they_end_their_pin_once(self, lmcache, coordinator, scope, answer_of):
        held, (done, go) = TimedPins(), answer_of("unpin")
        pin_id, _ = [await held.add(coordinator, scope, PROMPT, "s", 60) for _ in range(2)]
        removing = asyncio.create_task(held.remove(pin_id))
        await done.wait()
        removing.cancel()
        await asyncio.wait({removing})
        go.set()
        await held.remove(pin_id)
        assert (len(held), set(lmcache.pins.values())) == (1, {1})

    async def test_closing_ends_what_was_on_its_way(self, lmcache, coordinator, scope, answer_of):
        held, (done, go) = TimedPins(), answer_of("pin")
        adding = asyncio.create_task(held.add(coordinator, scope, PROMPT, "s", 60))
        await done.wait()
        closing = asyncio.create_task(held.aclose())
        await asyncio.sleep(0.01)
        go.set()
        await closing
        assert adding.done()
        assert lmcache.pins == {}

    async def test_closing_does_not_wait_for_long(self, coordinator, scope, answer_of, monkeypatch):
        monkeypatch.setattr(verbs, "_FAREWELL_S", 0.01)
        held, (done, _) = TimedPins(), answer_of("pin")
        adding = asyncio.create_task(held.add(coordinator, scope, PROMPT, "s", 60))
        await done.wait()
        await held.aclose()
        with pytest.raises(EngineUnavailable, match="removed"):
            await adding


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
    def chat(data, **more):
        return body(messages=[{"role": "user", "content": [{"type": "prompt_embeds", "data": data}]}], **more)

    assert embeddings_of(chat("QQ==")) not in (None, embeddings_of(chat("Qg==")))
    for above in (None, "QQ=="):
        one, two = (embeddings_of(chat(data, prompt_embeds=above)) for data in ("QQ==", "Qg=="))
        assert None not in (one, two)
        assert one != two


def test_embeddings_are_seen_however_they_are_written():
    raw = body(messages=[{"content": [{"type": "prompt_embeds", "data": "QQ=="}]}]).raw
    assert embeddings_of(JsonBody(raw.replace(b"prompt_embeds", b"prompt\\u005fembeds"))) is not None
    assert embeddings_of(body(messages=[{"content": "\0"}])) is None


@pytest.mark.parametrize(
    "fields", [{"prompt": 'say "prompt_embeds"'}, {"prompt": "x", "prompt_embeds": None}]
)
def test_text_has_none(fields):
    assert embeddings_of(body(**fields)) is None
