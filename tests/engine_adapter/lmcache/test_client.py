from contextlib import asynccontextmanager

import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.lmcache import client
from engine_adapter.lmcache.client import (
    Coordinator,
    Key,
    KeyPlacements,
    KvChunk,
    LmCacheNode,
    ObjectPlace,
    below_gpu,
    chunks_of,
    survey,
)
from engine_adapter.types import BelowGpu, Capability, EngineSpec
from tests.engine_adapter.lmcache.conftest import PROMPT, spec_of
from tests.fake_engines.text import MODEL_DIR


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


async def test_a_model_on_gpus_spread_over_ranks_has_more_to_its_name(start_lmcache):
    """Engines on GPUs are listed apart."""
    spread = f"{MODEL_DIR}##lmcache-dcp-layout-v1-d2-interleave1"
    server = start_lmcache(on_gpu=True, world_size=2, model=spread)
    async with surveyed(spec_of(server)) as (site, findings):
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
async def test_what_is_missing_is_named_with_the_flag_that_mends_it(start_lmcache, options, problem, remedy):
    async with surveyed(spec_of(start_lmcache(**options))) as (site, (finding,)):
        assert site is None
        assert problem in finding
        assert remedy in finding
        assert "kvpin does not use it" in finding


async def test_without_pins_the_rest_can_be_used(start_lmcache):
    async with surveyed(spec_of(start_lmcache(pins=False))) as (site, (finding,)):
        assert site.capabilities == MOVES
        assert "cannot pin" in finding


async def test_either_may_not_be_there(lmcache):
    nobody = "http://127.0.0.1:1"
    async with surveyed(spec_of(lmcache, lmcache=nobody)) as (site, (finding,)):
        assert (site, "is not reachable" in finding) == (None, True)
        assert nobody in finding
    async with surveyed(spec_of(lmcache, lmcache_coordinator=nobody)) as (site, (finding,)):
        assert (site, "coordinator http://127.0.0.1:1 is not reachable" in finding) == (None, True)
