"""Adapters of any kind, and a transport to their engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from engine_adapter import EngineAdapter, HttpTransport, make_adapter
from engine_adapter.prompt.chat import ChatTokenizer
from tests.engines import engine_spec


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., EngineAdapter]]:
    """Makes adapters: `make("vllm", url, dp_rank=1)`. Each is closed."""
    made: list[EngineAdapter] = []

    def make(kind: str, url: str, **fields: object) -> EngineAdapter:
        made.append(make_adapter(engine_spec(kind, url, "e", **fields)))
        return made[-1]

    yield make
    for adapter in made:
        await adapter.aclose()


@pytest.fixture
async def transport() -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(connect_timeout_s=2)
    yield transport
    await transport.aclose()


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir) -> ChatTokenizer:
    """The default model's; a test that changes one loads its own."""
    return ChatTokenizer.load(str(tokenizer_dir))
