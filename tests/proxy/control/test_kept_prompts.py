"""The prompts of the last requests, as workers tell them to each other."""

import msgspec

from proxy.control import kept_prompts
from proxy.control.kept_prompts import PromptsAndPins
from proxy.core.peers.messages import unpacked
from tests.kv_world import tokens

PROMPT = tokens(33)


async def test_a_worker_tells_hashes_and_no_tokens(world, pair):
    record = world.record("r1", PROMPT, tenant="t")
    world.record("r2", PROMPT, model="gone")
    world.record("r3", None)
    told = await world.prompts.told()
    (prompt,) = msgspec.msgpack.decode(told, type=PromptsAndPins).prompts
    assert (prompt.request_id, prompt.model, prompt.tenant, prompt.lora) == ("r1", "m", "t", None)
    assert unpacked(prompt.hashes) == tuple(world.pool.chain(record.prompt).hashes)
    assert msgspec.msgpack.encode(PROMPT)[3:] not in told


async def test_those_of_all_workers_come_the_oldest_first(world, pair):
    world.record("r1", PROMPT)
    first = await world.prompts.told()
    world.record("r2", PROMPT)
    world.told = [await world.prompts.told(), first]
    assert [each.request_id for each in (await world.prompts.all()).prompts] == ["r1"] * 3 + ["r2"] * 2


async def test_a_long_prompt_is_hashed_in_parts(world, pair, monkeypatch):
    monkeypatch.setattr(kept_prompts, "_SLICE_BLOCKS", 1)
    record = world.record("r1", PROMPT)
    (only,) = (await world.prompts.own()).prompts
    assert unpacked(only.hashes) == tuple(world.pool.chain(record.prompt).hashes)
