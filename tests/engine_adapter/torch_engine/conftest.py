"""One engine in this process behind a real socket, so that tests see both sides of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
import torch

from engine_adapter.torch_engine.model import load_model
from engine_adapter.torch_engine.serve import EmbeddedOptions
from engine_adapter.torch_engine.server import EngineHost, create_app
from engine_adapter.torch_engine.service import EngineService
from tests.engines import served

MAX_BODY_BYTES = 4 << 20
# With KVPIN_TEST_DEVICE=cuda, engines and models that name no device run there.
for function in (load_model, EmbeddedOptions.__init__):
    function.__kwdefaults__["device"] = os.environ.get("KVPIN_TEST_DEVICE", "cpu")


@dataclass(frozen=True, slots=True)
class ServedEngine:
    url: str
    service: EngineService


@pytest.fixture(scope="session")
def served_engine() -> Iterator[ServedEngine]:
    """Tests share its cache and counters: use your own prompts or salts."""
    torch.set_num_threads(1)
    options = EmbeddedOptions(threads=1, kv_blocks=256, host_cache_bytes=64 << 20, prefill_chunk=64)
    service = EngineService(options)
    try:
        with served(create_app(EngineHost(service), max_body_bytes=MAX_BODY_BYTES)) as url:
            yield ServedEngine(url, service)
    finally:
        service.close()


@pytest.fixture
async def client(served_engine) -> httpx.AsyncClient:
    async with httpx.AsyncClient(base_url=served_engine.url, timeout=60, trust_env=False) as client:
        yield client
