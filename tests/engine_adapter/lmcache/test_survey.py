from contextlib import asynccontextmanager

import pytest

from engine_adapter.lmcache.client import Coordinator, LmCacheNode, survey
from engine_adapter.types import Capability, EngineSpec
from tests.engine_adapter.lmcache.conftest import spec_of
from tests.fake_engines.text import MODEL_DIR

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


async def test_engines_on_gpus_are_listed_apart(start_lmcache):
    async with surveyed(spec_of(start_lmcache(on_gpu=True, world_size=2))) as (site, findings):
        assert (site.scope.world_size, findings) == (2, [])


async def test_a_model_spread_over_ranks_has_more_to_its_name(start_lmcache):
    spread = f"{MODEL_DIR}##lmcache-dcp-layout-v1-d2-interleave1"
    async with surveyed(spec_of(start_lmcache(model=spread))) as (site, _):
        assert site.scope.model_name == spread


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
