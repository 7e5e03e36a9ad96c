"""Checkpoints of another prompt that a server keeps (`Checkpoint.is_stale`): no prompt goes on behind one."""

from __future__ import annotations

import json
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

NEW = prompt_of(2, 300)
END = prompt_of(9, 6)
# The server goes on at a checkpoint of one token, and that one is of another prompt.
WINDOW = [prompt_of(0, 6), prompt_of(0, 1) + prompt_of(1, 300), NEW, prompt_of(2, 1) + prompt_of(3, 40) + END]
STATE = [prompt_of(0, 5), NEW, prompt_of(2, 40) + END]
# At 50 and 51 tokens there are states; the second one stays when token 50 changes.
HEAD = prompt_of(0, 50)
LATER_STATE = [
    prompt_of(0, 54),
    prompt_of(0, 53) + prompt_of(1, 2),
    HEAD + prompt_of(2, 1500),
    HEAD + prompt_of(2, 250) + END,
]
STALE = [("swa", WINDOW), ("linear", STATE), ("conv", STATE)]


async def right_of(start_llama, shape, prompts, *flags):
    """What a server says to the last prompt if it reuses nothing; a bare one says something else."""
    server = start_llama(*flags, model=gguf_path(shape), slots=1, ctx=4096)
    asked = {"n_predict": 12, "temperature": 0, "n_probs": 1, "id_slot": 0}
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client:

        async def ask(prompt, *, reuse):
            body = asked | {"prompt": prompt.tolist(), "cache_prompt": reuse}
            return (await client.post("/completion", json=body)).json()

        alone = [await ask(prompt, reuse=True) for prompt in prompts][-1]
        right = await ask(prompts[-1], reuse=False)
    assert alone["timings"]["cache_n"] > 0
    assert alone["completion_probabilities"] != right["completion_probabilities"], "or it proves nothing"
    return right["content"]


@pytest.mark.parametrize(("shape", "prompts"), [("swa", WINDOW), ("linear", LATER_STATE)])
async def test_nothing_goes_on_behind_a_checkpoint_of_another_prompt(start_llama, shape, prompts):
    right = await right_of(start_llama, shape, prompts)
    server = start_llama(model=gguf_path(shape), slots=1, ctx=4096)
    async with slot_world(server.url) as world:
        await world.ask(prompt_of(8, 300))  # computed whole: its checkpoints are known
        for prompt in prompts[:-1]:
            await world.ask(prompt)
        assert await world.ask(prompts[-1], max_tokens=12) == (right, 0, 0)


@pytest.mark.parametrize(("shape", "prompts"), STALE)
async def test_nor_behind_a_text_whose_tokens_are_unknown(start_llama, shape, prompts):
    right = await right_of(start_llama, shape, prompts)
    server = start_llama(model=gguf_path(shape), slots=1, ctx=4096)
    async with slot_world(server.url) as world:
        for prompt in (prompt_of(8, 300), *prompts[:-2]):
            await world.ask(prompt)
        body = {"prompt": prompts[-2].tolist(), "max_tokens": 1, "temperature": 0}
        untold = JsonBody(json.dumps(body).encode()), KvTarget()
        async with world.adapter.hold("/v1/completions", *untold) as hold:
            await world.answer(hold)
        assert (await world.ask(prompts[-1], max_tokens=12))[0] == right


@pytest.mark.parametrize("shape", ["linear", "conv"])
async def test_nor_where_the_server_is_tried_out_while_a_request_runs(start_llama, save_dir, shape):
    """What the server's memory is, is learned while the request runs on another slot."""
    right = await right_of(start_llama, shape, STATE)
    server = start_llama(model=gguf_path(shape), slots=1, ctx=4096, save_dir=save_dir)
    async with scheduler_world(server) as world:
        kind = world.facts.kind
        world.contents.learn(replace(world.facts, memory=UNPROBED))
        await world.ask(STATE[0])
        async with world.scheduler.lease(SlotRequest(STATE[1])) as lease:
            await world.send(lease)
            world.contents.learn(replace(world.facts, memory=memory_rules(kind, world.facts)))
        await world.idle()
        lease = await world.ask(STATE[-1], max_tokens=12)
    assert "".join(lease.answer.pieces) == right


@pytest.mark.parametrize("shape", ["linear", "conv", "swa"])
@pytest.mark.parametrize("size", [128, 256])
async def test_nor_on_a_server_whose_batches_are_not_the_default(start_llama, save_dir, shape, size):
    """`-ub N` puts a checkpoint of one token into a prompt of N + 5 tokens; kvpin expects it for 512."""
    prompts = [prompt_of(0, size + 5), prompt_of(2, 700), prompt_of(2, 40) + END]
    right = await right_of(start_llama, shape, prompts, "-ub", str(size))
    flags = {"model": gguf_path(shape), "slots": 1, "ctx": 4096, "save_dir": save_dir}
    async with slot_world(start_llama("-ub", str(size), **flags).url) as world:
        for prompt in prompts[:-1]:
            await world.ask(prompt)
        assert (await world.ask(prompts[-1], max_tokens=12))[0] == right
