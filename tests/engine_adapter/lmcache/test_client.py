from array import array

import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.lmcache import client
from engine_adapter.lmcache.client import (
    Key,
    KeyPlacements,
    KvChunk,
    ObjectPlace,
    below_gpu,
    chunks_of,
    leading,
    text_of,
)
from engine_adapter.types import BelowGpu, KvTarget
from tests.engine_adapter.lmcache.conftest import PROMPT


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
def test_what_a_node_holds_and_is_about_to_write(pending, in_flight, is_storing):
    storage = client.Storage(
        {"_default": client.L1(5), "other": client.L1(2)},
        {"_default": client.Storing(), "other": client.Storing(pending, in_flight)},
        1,
    )
    assert (storage.l1_objects, storage.is_storing) == (7, is_storing)


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
