"""The bridge between engine thread and event loop, with a real engine."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engine_adapter.errors import EngineUnavailable
from engine_adapter.torch_engine.generation import Generation
from engine_adapter.torch_engine.options import EngineOptions, ServiceOptions
from engine_adapter.torch_engine.requests import Finished, GenerationRequest, RequestRefused, SamplingParams
from engine_adapter.torch_engine.service import EngineService
from engine_adapter.types import token_array

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def request(name, length=20, sampling=GREEDY):
    return GenerationRequest(name, token_array(range(5, 5 + length)), sampling, cache_salt=name)


async def collected(generation):
    outputs = []
    while not outputs or not isinstance(outputs[-1], Finished):
        outputs += await generation.outputs()
    return outputs


async def test_scheduled_then_tokens_then_the_end(served_engine):
    engine = served_engine.service.engine
    async with Generation(engine, request("in-order")) as generation:
        await generation.scheduled()
        outputs = await collected(generation)
    assert generation.cached_tokens == 0
    assert [type(output).__name__ for output in outputs] == ["Token"] * 5 + ["Finished"]
    async with Generation(engine, request("in-order")) as generation:
        await generation.scheduled()
        assert generation.cached_tokens == 16
        assert [o.token_id for o in (await collected(generation))[:-1]] == [o.token_id for o in outputs[:-1]]


async def test_leaving_early_cancels(served_engine):
    engine = served_engine.service.engine
    before = engine.counters.finished.get("cancelled", 0)
    async with Generation(
        engine, request("early", sampling=SamplingParams(max_tokens=3000, ignore_eos=True))
    ) as g:
        await g.scheduled()
    for _ in range(1000):
        if engine.counters.finished.get("cancelled", 0) > before:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the request goes on")


async def test_a_refused_request(served_engine):
    engine = served_engine.service.engine
    with pytest.raises(RequestRefused):
        async with Generation(engine, request("long", engine.max_model_len + 1)):
            pytest.fail("it was taken")


async def test_an_engine_that_stops_in_the_middle():
    torch.set_num_threads(1)
    service = EngineService.build(ServiceOptions(threads=1, engine=EngineOptions(kv_blocks=64)))
    try:
        async with Generation(
            service.engine, request("stop", sampling=SamplingParams(max_tokens=900, ignore_eos=True))
        ) as g:
            await g.scheduled()
            await asyncio.to_thread(service.close)
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await collected(g)
        with pytest.raises(EngineUnavailable):
            async with Generation(service.engine, request("late")):
                pytest.fail("it was taken")
    finally:
        await asyncio.to_thread(service.close)
