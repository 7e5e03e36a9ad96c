"""A control client for the servers that tests start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from engine_adapter.openai_http import ControlClient
from engine_adapter.types import EngineSpec


@pytest.fixture
async def control_of() -> AsyncIterator[Callable[[str], ControlClient]]:
    """Opens clients: `control_of(server.url)`."""
    clients = []

    def make(url: str) -> ControlClient:
        clients.append(ControlClient(EngineSpec(kind="llama_server", url=url, id="e")))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def control(llama, control_of) -> ControlClient:
    """A client of the shared server."""
    return control_of(llama.url)
