"""Tenants on every route of a real vLLM."""

import pytest

from tests.live.isolation import KEYS, reuse_by_route, told
from tests.vllm_live.vllm_world import vllm_world

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_no_route_reuses_another_tenants_kv(tmp_path, tell):
    with vllm_world(tmp_path, kvpin_flags=KEYS) as world:
        found = reuse_by_route(world, "vllm:prefix_cache_hits_total")
    tell(*told(found))
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert found[path].again > 100, path
    assert {path: reuse.other for path, reuse in found.items() if reuse.other} == {}
