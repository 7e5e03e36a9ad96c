"""The adapters under contract, each in front of a real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from engine_adapter import AiohttpTransport, EngineAdapter, EngineSpec, make_adapter


@pytest.fixture(params=["embedded", "openai_compatible", "llama_server"])
async def adapter(request, embedded_engine, llama) -> AsyncIterator[EngineAdapter]:
    """Each kind of adapter, in front of a shared engine of its kind."""
    is_llama = request.param == "llama_server"
    spec = EngineSpec(
        kind=request.param,
        url=llama.url if is_llama else embedded_engine.url,
        id="under-test",
        host_cache_dir=str(llama.save_dir) if is_llama else None,
    )
    adapter = make_adapter(spec)
    yield adapter
    await adapter.aclose()


@pytest.fixture
async def adapter_of() -> AsyncIterator[Callable[..., EngineAdapter]]:
    """Makes adapters of a test's own: `adapter_of("embedded", url)`."""
    made: list[EngineAdapter] = []

    def make(kind: str, url: str, **fields: str) -> EngineAdapter:
        made.append(make_adapter(EngineSpec(kind=kind, url=url, id="under-test", **fields)))
        return made[-1]

    yield make
    for adapter in made:
        await adapter.aclose()


@pytest.fixture
async def transport() -> AsyncIterator[AiohttpTransport]:
    transport = AiohttpTransport()
    yield transport
    await transport.aclose()
