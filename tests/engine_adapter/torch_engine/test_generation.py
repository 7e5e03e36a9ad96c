"""The bridge between engine thread and event loop, with a real engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engine_adapter.torch_engine.engine import MAX_FAILED_STEPS
from engine_adapter.torch_engine.requests import (
    Finished,
    GenerationRequest,
    RequestRefused,
    SamplingParams,
    Token,
)
from engine_adapter.torch_engine.service import Generation
from engine_adapter.types import token_array

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def request(name, length=20, sampling=GREEDY):
    return GenerationRequest(name, token_array(range(5, 5 + length)), sampling, cache_salt=name)


async def collected(generation):
    outputs = []
    while not outputs or not isinstance(outputs[-1], Finished):
        outputs += (await generation.outputs())[0]
    return outputs


async def test_one_refused_request_ends_all_of_them(served_engine):
    engine = served_engine.service.engine
    before = engine.counters.finished.get("cancelled", 0)
    long = request("fine", sampling=SamplingParams(max_tokens=3000, ignore_eos=True))
    with pytest.raises(RequestRefused):
        async with Generation(engine, [long, request("long", engine.max_model_len + 1)]):
            pytest.fail("it was taken")
    for _ in range(1000):
        if engine.counters.finished.get("cancelled", 0) > before:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the other request goes on")


async def answered(engine, each):
    """The outputs of a request. The engine may give it up before or after it is seen to run."""
    async with Generation(engine, [each]) as generation:
        return await collected(generation)


class GivesUp:
    """A constraint that cannot go on after some tokens."""

    def __init__(self, tokens):
        self.left = tokens

    def allow(self, words):
        if not self.left:
            raise RequestRefused("guided_regex cannot be followed", param="guided_regex")
        words[:] = -1

    def accept(self, token):
        self.left -= 1


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_request_that_is_given_up_is_the_clients_fault_and_the_engine_goes_on(served_engine, tokens):
    engine = served_engine.service.engine
    for index in range(MAX_FAILED_STEPS + 1):
        constrained = replace(request(f"gives-up-{index}"), constraint=GivesUp(tokens))
        with pytest.raises(RequestRefused) as caught:
            await answered(engine, constrained)
        assert caught.value.param == "guided_regex"
    assert sum(isinstance(each, Token) for each in await answered(engine, request("after"))) == 5
    assert engine.alive
