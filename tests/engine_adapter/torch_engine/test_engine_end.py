"""What clients see when the engine stops during an answer: never what looks like a whole answer."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import torch

from engine_adapter.torch_engine.engine import is_fatal
from engine_adapter.torch_engine.serve import EmbeddedOptions
from engine_adapter.torch_engine.server import EngineHost, create_app
from engine_adapter.torch_engine.service import EngineService
from tests.engine_adapter.torch_engine.engine_world import until
from tests.engines import served

BODY = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
async def mortal():
    """A service for this test alone, and its client."""
    torch.set_num_threads(1)
    service = await asyncio.to_thread(EngineService, EmbeddedOptions(threads=1, kv_blocks=64))
    try:
        with served(create_app(EngineHost(service))) as url:
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
                yield service, client
    finally:
        await asyncio.to_thread(service.close)


async def test_streams_and_answers_are_cut_and_health_tells(mortal):
    service, client = mortal
    lines: list[str] = []

    async def read_stream() -> None:
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            async for line in response.aiter_lines():
                lines.append(line)  # noqa: PERF401 - kept although the stream breaks

    reading = asyncio.create_task(read_stream())
    whole = asyncio.create_task(client.post("/v1/completions", json=BODY))
    await until(lambda: lines and service.engine.counters.running == 2)
    await asyncio.to_thread(service.engine.stop)
    with pytest.raises(httpx.RemoteProtocolError):
        await reading
    assert (await whole).status_code == 503  # nothing was sent yet: another engine can answer
    last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    for path in ("/health", "/v1/models", "/kv/info"):
        assert (await client.get(path)).status_code == 503
    assert (await client.post("/v1/completions", json=BODY)).status_code == 503
    assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_errors_of_the_device_are_fatal(error, fatal):
    assert is_fatal(error) is fatal
