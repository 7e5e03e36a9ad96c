"""Checkpoints of another prompt that a server keeps (`Checkpoint.is_stale`): no prompt goes on behind one."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

import httpx
import pytest

from engine_adapter import JsonBody, KvTarget
from engine_adapter.llama_server.checkpoints import UNPROBED
from engine_adapter.llama_server.probe import memory_rules
from engine_adapter.llama_server.turns import SlotRequest
from scripts.make_gguf import gguf_path
from tests.engine_adapter.llama_server.scheduler_world import scheduler_world
from tests.engine_adapter.llama_server.slot_world import prompt_of, slot_world
from tests.engine_adapter.llama_server.test_unknown_slots import direct, ids

STALE = {
    "swa": [ids(0, 6), ids(0, 1) + ids(1, 300), ids(2, 300), ids(2, 1) + ids(3, 40)],
    "linear1": [ids(0, 5), ids(2, 300), ids(2, 40)],
    "conv1": [ids(0, 5), ids(2, 300), ids(2, 40)],
}


async def right_of(start_llama, shape, prompts):
    """The last prompt, and what a server says to it that reuses nothing; a bare one says something else."""
    server = start_llama(model=gguf_path(shape.rstrip("1")), slots=1, ctx=4096)
    last = prompts[-1] + ids(9, 6)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client:
        for prompt in (*prompts[:-1], last):
            alone = (await client.post("/completion", json=direct(prompt, reuse=True))).json()
        right = (await client.post("/completion", json=direct(last, reuse=False))).json()
    assert alone["completion_probabilities"] != right["completion_probabilities"], "or it proves nothing"
    return last, right


@pytest.mark.parametrize("shape", STALE)
@pytest.mark.parametrize("told", [True, False])
async def test_adopted_slot_with_a_stale_checkpoint(start_llama, save_dir, shape, told):
    prompts = STALE[shape]
    last, right = await right_of(start_llama, shape, prompts)
    server = start_llama(model=gguf_path(shape.rstrip("1")), slots=1, ctx=4096, save_dir=save_dir)
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        await world.ask(prompt_of(8, 300))
        for prompt in prompts[:-1]:
            await world.ask(array("i", prompt))
        if told:
            await world.adapter.load()
            await world.adapter.leave()
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        text, *_ = await world.ask(array("i", last), max_tokens=12)
    assert text == right["content"]


@pytest.mark.parametrize("shape", ["swa", "linear1", "conv1"])
async def test_text_whose_tokens_are_unknown_then_known(start_llama, save_dir, shape):
    prompts = STALE[shape]
    last, right = await right_of(start_llama, shape, prompts)
    server = start_llama(model=gguf_path(shape.rstrip("1")), slots=1, ctx=4096)
    async with slot_world(server.url) as world:
        await world.ask(prompt_of(8, 300))
        for prompt in prompts[:-2]:
            await world.ask(array("i", prompt))
        body = {"prompt": prompts[-2], "max_tokens": 1, "temperature": 0}
        hold = world.adapter.hold("/v1/completions", JsonBody(json.dumps(body).encode()), KvTarget())
        async with hold as held:
            async with await world.sent(held) as response:
                held.answer.feed(await response.read())
            held.answer.finish()
        text, *_ = await world.ask(array("i", last), max_tokens=12)
    assert text == right["content"]


@pytest.mark.parametrize("shape", ["linear1", "conv1"])
async def test_a_request_that_runs_while_the_server_is_tried_out(start_llama, save_dir, shape):
    """What the server's memory is, is learned while the request runs on another slot."""
    prompts = STALE[shape]
    last, right = await right_of(start_llama, shape, prompts)
    server = start_llama(model=gguf_path(shape.rstrip("1")), slots=1, ctx=4096, save_dir=save_dir)
    async with scheduler_world(server) as world:
        kind = world.facts.kind
        world.contents.learn(replace(world.facts, memory=UNPROBED))
        await world.ask(array("i", prompts[0]))
        async with world.scheduler.lease(SlotRequest(array("i", prompts[1]))) as lease:
            await world.send(lease)
            world.contents.learn(replace(world.facts, memory=memory_rules(kind, world.facts)))
        await world.idle()
        lease = await world.ask(array("i", last), max_tokens=12)
        text = "".join(lease.answer.pieces)
    assert text == right["content"]


@pytest.mark.parametrize("shape", ["linear", "conv", "swa"])
@pytest.mark.parametrize("flags", [("-ub", "128"), ("-ub", "256")])
async def test_a_server_whose_batches_are_not_the_default(start_llama, save_dir, shape, flags):
    """`-ub N` puts a checkpoint of one token into a prompt of N + 5 tokens; kvpin expects it for 512."""
    size = int(flags[-1])
    q = ids(2, 700)
    prompts, last = [ids(0, size + 5), q], q[:40] + ids(9, 6)
    bare = start_llama(*flags, model=gguf_path(shape), slots=1, ctx=4096)
    async with httpx.AsyncClient(base_url=bare.url, trust_env=False, timeout=60) as client:
        for prompt in (*prompts, last):
            await client.post("/completion", json=direct(prompt, reuse=True))
        right = (await client.post("/completion", json=direct(last, reuse=False))).json()
    server = start_llama(*flags, model=gguf_path(shape), slots=1, ctx=4096, save_dir=save_dir)
    async with slot_world(server.url) as world:
        for prompt in prompts:
            await world.ask(array("i", prompt))
        text, *_ = await world.ask(array("i", last), max_tokens=12)
    assert text == right["content"]
