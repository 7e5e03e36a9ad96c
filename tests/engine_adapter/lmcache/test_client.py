from array import array

import msgspec
import pytest

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.lmcache import client
from engine_adapter.lmcache.client import (
    Chunk,
    Coordinator,
    Key,
    KeyPlacements,
    LmCacheNode,
    ObjectPlace,
    below_gpu,
    chunks_of,
    leading,
    text_of,
)
from engine_adapter.types import BelowGpu, KvTarget
from tests.engine_adapter.lmcache.conftest import PROMPT, spec_of


async def test_a_node_tells_what_it_is(lmcache, node):
    lmcache.store(PROMPT)
    await node.check()
    status, config = await node.status(), await node.config()
    assert (status.chunk_size, status.storage_manager.l1_objects) == (64, 6)
    assert (config.mp.instance_id, config.coordinator.url) == ("node-a", lmcache.coordinator_url)


async def test_a_prefetch_is_told_of_once_when_it_is_over(lmcache, node, scope):
    lmcache.store(PROMPT)
    lmcache.evict(PROMPT)
    begun = await node.prefetch(scope, PROMPT, "")
    assert begun.status == "submitted"
    assert (await node.prefetched(begun.request_id)).status == "pending"
    over = await node.prefetched(begun.request_id)
    assert (over.status, over.found_keys, over.total_keys) == ("completed", 6, 6)
    with pytest.raises(EngineRejected, match="unknown prefetch"):
        await node.prefetched(begun.request_id)


async def test_objects_are_dropped_by_tier(lmcache, node, coordinator, scope):
    lmcache.store(PROMPT)
    keys = [each.key for each in (await coordinator.lookup(scope, PROMPT, "")).results]
    assert (await node.delete(keys[:2], "l1")).deleted == 2
    assert lmcache.tiers(PROMPT) == ["l2", "l2", *["l1+l2"] * 4]
    assert (await node.delete(keys, "all")).skipped == 0
    assert lmcache.tiers(PROMPT) == [""] * 6


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


async def test_pins_count(lmcache, coordinator, scope):
    for expected in (1, 2):
        assert await coordinator.pin(scope, PROMPT, "") == 6
        assert set(lmcache.pins.values()) == {expected}
    assert await coordinator.pins() == 6
    assert await coordinator.unpin(scope, PROMPT, "") == 6
    assert set(lmcache.pins.values()) == {1}


async def test_nobody_there_and_somebody_else(lmcache):
    for url, error in (("http://127.0.0.1:1", EngineUnavailable), (lmcache.coordinator_url, EngineRejected)):
        node = LmCacheNode(spec_of(lmcache), url)
        with pytest.raises(error):
            await node.status()
        await node.aclose()
    stranger = Coordinator(spec_of(lmcache), lmcache.url)
    with pytest.raises(EngineRejected):
        await stranger.instances()
    await stranger.aclose()


async def test_an_answer_of_another_shape(coordinator, monkeypatch):
    async def other(*_args, **_kwargs):
        return b'{"instances": "none"}'

    monkeypatch.setattr(coordinator._control, "fetch", other)
    with pytest.raises(EngineUnavailable, match="GET /instances: the answer is not as expected"):
        await coordinator.instances()


def test_a_real_placement_is_read():
    recorded = b"""{"chunks":1,"results":[{"key":{"chunk_hash_hex":"92dd","model_name":"/models/tiny",
        "kv_rank":16777472,"object_group_id":0,"cache_salt":""},"placements":[
        {"instance_id":"node-a","incarnation":1795251773,"tier":"l1","backend":"dram","size_bytes":131072,
        "shared":false}],"token_ids":[],"access_count":1}]}"""
    lookup = msgspec.json.decode(recorded, type=client.Lookup)
    key = client.Key("92dd", "/models/tiny", 16777472)
    assert lookup.results[0].key == key
    assert lookup.results[0].placements == [client.ObjectPlace("node-a", "l1", 131072)]
    assert msgspec.json.decode(msgspec.json.encode(key), type=client.Key) == key


@pytest.mark.parametrize(("pending", "in_flight", "is_storing"), [(0, 0, False), (3, 0, True), (0, 1, True)])
def test_what_a_node_holds_and_is_about_to_write(pending, in_flight, is_storing):
    storage = client.Storage(
        {"_default": client.L1(5), "other": client.L1(2)},
        {"_default": client.Storing(), "other": client.Storing(pending, in_flight)},
        1,
    )
    assert (storage.l1_objects, storage.is_storing) == (7, is_storing)


def chunk(tiers: str) -> Chunk:
    return Chunk((), "h" in tiers, "d" in tiers, 100)


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
    assert [(each.on_host, each.on_disk, len(each.keys)) for each in found] == [
        (False, True, 2),
        (True, False, 1),
    ]
    assert [each.bytes for each in found] == [200, 100]


def test_objects_of_another_salt_are_another_chunk():
    assert len(chunks_of([objects("x", "l1"), objects("x", "l1", salt="s")], "a")) == 2


@pytest.mark.parametrize(
    ("instance", "shared", "held"), [("a", False, True), ("b", False, False), ("b", True, True)]
)
def test_what_other_nodes_hold_counts_where_it_is_shared(instance, shared, held):
    (found,) = chunks_of([objects("x", "l2", instance=instance, shared=shared)], "a")
    assert found.held is held


def test_leading_chunks_end_at_the_first_gap():
    assert len(leading([chunk("h"), chunk("d"), chunk(""), chunk("h")])) == 2


def test_only_whole_chunks_before_the_first_image_are_text():
    tokens, marks = array("i", range(200)), array("Q", bytes(8 * 200))
    assert len(text_of(KvTarget(tokens), 64)) == 192
    assert len(text_of(KvTarget(tokens, marks), 64)) == 192
    marks[130] = 1
    assert text_of(KvTarget(tokens, marks), 64) == tokens[:128]
    assert len(text_of(KvTarget(), 64)) == 0
