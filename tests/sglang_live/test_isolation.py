"""Tenants on every route of a real SGLang."""

import pytest

from tests.live.isolation import KEYS, reuse_by_route, told
from tests.sglang_live.sglang_world import SglangOptions, sglang_world

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_no_route_reuses_another_tenants_kv(tmp_path, tell):
    options = SglangOptions(flags=("--enable-cache-report", "--enable-metrics"))
    with sglang_world(tmp_path, options, kvpin_flags=KEYS) as world:
        found = reuse_by_route(world, "sglang:cached_tokens_total")
    tell(*told(found))
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        assert found[path].again > 100, path
    assert {path: reuse.other for path, reuse in found.items() if reuse.other} == {}
