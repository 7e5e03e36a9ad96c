import asyncio
from array import array

import msgspec
import pytest

from engine_adapter import Tier
from proxy.control import prefixes
from proxy.control.operations import Target
from proxy.control.prefixes import PromptsAndPins
from proxy.core.peers.messages import unpacked
from proxy.errors import BadRequest, NotFound
from proxy.prompt import Prompt
from proxy.request.calls import Session
from tests.kv_world import tokens

SYSTEM = tokens(32)
FIRST, SECOND = SYSTEM + tokens(32, start=1), SYSTEM + tokens(16, start=2)


async def look(world, under=None, depth=9, most=99):
    return await world.prefixes.look(under, depth, most)


async def test_what_prompts_share_and_who_holds_it(world, pair):
    world.served(pair[0], FIRST)
    world.served(pair[1], SYSTEM)
    world.pool.index.store("b", Tier.HOST, world.pool.chain(Prompt(array("i", SECOND))).hashes)
    world.record("r1", FIRST)
    world.record("r2", SECOND)
    world.record("unknown", None)
    found = await look(world)
    assert (found.requests, found.tokens, found.path, found.unshown) == (2, 80, [], 0)
    (system,) = found.prefixes
    assert (system.start, system.end, system.below, system.requests, system.engines) == (0, 32, 80, 2, 2)
    assert (system.request_id, system.last_used, system.model, system.unshown) == ("r2", 2.0, "m", 0)
    first, second = system.children
    assert (first.start, first.end, first.request_id) == (32, 64, "r1")
    assert [(h.engine, h.tokens) for h in first.holders] == [("a", {"gpu": 32})]
    assert [(h.engine, h.tokens) for h in second.holders] == [("b", {"host": 16})]


async def test_a_prefix_is_named_by_its_conversation_and_by_its_words_if_they_are_asked_for(world, pair):
    world.record("r1", FIRST, session=Session("red", "talk-7"), tenant="red")
    world.record("r2", SECOND)
    (system,) = (await look(world)).prefixes
    first, second = system.children
    assert [(each.session, each.words) for each in (first, second)] == [("talk-7", None), (None, None)]
    (system,) = (await world.prefixes.look(None, 9, 99, words=True)).prefixes
    decode = world.pool.prompts.decode
    assert system.words == decode(array("i", SYSTEM[:12]))
    assert [child.words for child in system.children] == [
        decode(array("i", each[32:44])) for each in (FIRST, SECOND)
    ]
    assert world.prefixes.words("of another worker", 0) is None


async def test_a_part_of_the_tree(world, pair):
    world.record("r1", FIRST)
    world.record("r2", SECOND)
    (system,) = (await look(world, depth=1)).prefixes
    assert (system.children, system.unshown) == ([], 2)
    (system,) = (await look(world, most=2)).prefixes
    assert ([child.request_id for child in system.children], system.unshown) == (["r1"], 1)
    world.record("r3", tokens(16, start=3))
    assert (await look(world, most=1)).unshown == 1
    below = await look(world, under=system.children[0].id)
    assert [each.end for each in below.path] == [32, 64]
    assert [each.request_id for each in below.prefixes] == ["r1"]
    with pytest.raises(NotFound):
        await look(world, under="ab")
    with pytest.raises(BadRequest):
        await look(world, under="no hex")


async def test_salts_are_kept_apart_and_of_models_that_are_gone_nothing_is_shown(world, pair):
    world.record("r1", SYSTEM, salt="s", tenant="s")
    world.record("r2", SYSTEM)
    world.record("r3", SYSTEM, model="gone")
    found = await look(world)
    assert {each.tenant for each in found.prefixes} == {"s", None}
    assert found.requests == 2


async def test_a_pin_is_shown_on_all_that_it_protects_also_that_of_another_worker(world, pair):
    world.served(pair[0], FIRST)
    world.record("r1", FIRST)
    operation = await world.kv.pin(Target(request_id="r1", tokens=64), 60)
    assert await operation.wait(5)
    told = await world.prefixes.told()
    world.record("r2", SECOND)

    async def pins():
        (system,) = (await look(world)).prefixes
        first, second = sorted(system.children, key=lambda child: child.request_id)
        return system.pins, first.pins, second.pins

    pinned = [operation.result["pin_id"]]
    assert await pins() == (pinned, pinned, [])
    world.now += 60
    assert await pins() == ([], [], [])
    world.told = [told]  # as a worker would that has the same
    assert await pins() == (pinned, pinned, [])


async def test_the_prompts_of_other_workers_are_in_the_tree(world, pair):
    world.record("r1", FIRST)
    world.told = [await world.prefixes.told()]  # as a worker would that has the same
    world.record("r2", SECOND)
    found = await look(world)
    assert (found.requests, found.tokens) == (3, 80)
    (system,) = found.prefixes
    assert (system.requests, system.request_id, system.end) == (3, "r2", 32)
    assert [(each.request_id, each.requests) for each in system.children] == [("r1", 2), ("r2", 1)]
    below = await look(world, under=system.children[1].id)
    assert [each.request_id for each in below.prefixes] == ["r2"]


async def test_requests_are_served_while_it_looks(world, pair):
    for number in range(20):
        world.record(f"r{number}", SYSTEM + tokens(32, start=number))
    turns = 0

    async def serve():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    serving = asyncio.create_task(serve())
    await look(world)
    serving.cancel()
    assert turns >= 3 * 20  # each prompt is read, hashed, and shown


PROMPT = tokens(33)


async def test_a_worker_tells_hashes_and_no_tokens(world, pair, monkeypatch):
    monkeypatch.setattr(prefixes, "_SLICE_BLOCKS", 1)  # a long prompt is hashed in parts
    record = world.record("r1", PROMPT, tenant="t")
    world.record("r2", PROMPT, model="gone")
    world.record("r3", None)
    told = await world.prefixes.told()
    (prompt,) = msgspec.msgpack.decode(told, type=PromptsAndPins).prompts
    assert (prompt.request_id, prompt.model, prompt.tenant, prompt.lora) == ("r1", "m", "t", None)
    assert unpacked(prompt.hashes) == tuple(world.pool.chain(record.prompt).hashes)
    assert msgspec.msgpack.encode(PROMPT)[3:] not in told
