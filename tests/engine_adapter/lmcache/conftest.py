"""An LMCache on real sockets, without the engine above it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest

from engine_adapter.lmcache.client import Coordinator, LmCacheNode, LmCacheSite, Scope
from engine_adapter.types import EngineSpec
from tests.engines import engine_spec
from tests.fake_engines.lmcache import FakeLmCache, running_lmcache

PROMPT = array("i", range(100, 500))  # six chunks of 64, and a rest
WHOLE = 384


@pytest.fixture
def start_lmcache() -> Iterator[Callable[..., FakeLmCache]]:
    """`start_lmcache(l2=False)` with `LmCacheOptions`."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(running_lmcache(**options))


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
