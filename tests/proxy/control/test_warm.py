import asyncio
from array import array
from dataclasses import replace

import pytest

from engine_adapter import Capability, NotSupported
from proxy.control.kv import Warming
from proxy.control.operations import OperationPart, OperationState, Target
from proxy.control.target_engines import Prefix
from proxy.errors import BadRequest, NoEngine
from proxy.fleet.engine import EngineState
from proxy.prompt import Prompt
from tests.fakes import FakeEngine
from tests.kv_world import ALL, KvFake, tokens

NO_EVENTS = ALL - {Capability.KV_EVENTS}


@pytest.fixture
async def servers(world):
    """Two engines on sockets."""
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        for server in (a, b):
            world.add(KvFake(server.id, NO_EVENTS, url=server.url))
        yield a, b


def prefix_of(world):
    """A prefix of two blocks."""
    prompt = Prompt(array("i", tokens(32)))
    return Prefix(world.pool, prompt, world.pool.chain(prompt), "token_ids")


async def finished(operation):
    assert await operation.wait(5)
    return operation


async def test_one_token_is_asked_of_the_engine_placement_picks(world, servers):
    a, b = servers
    world.served(world.engines["b"].adapter, tokens(32))
    operation = await finished(await world.warming.warm(Target(token_ids=tokens(48))))
    assert operation.state is OperationState.DONE
    assert (operation.parts[0].engine, operation.parts[0].done) == ("b", 3)
    assert not a.seen
    request = b.seen[0]
    assert (request.target, request.json["max_tokens"]) == ("/v1/completions", 1)
    assert request.json["prompt"] == tokens(48)
    assert request.headers["content-type"] == "application/json"
    assert "cache_salt" not in request.json


async def test_the_index_learns_what_was_warmed_and_nothing_stays_in_flight(world, servers):
    await finished(await world.warming.warm(Target(token_ids=tokens(48), engine="a")))
    assert world.matched(tokens(48)) == {"a": 3}
    assert world.engines["a"].ledger.in_flight == 0
    assert world.engines["a"].ledger.placed == 1
    assert world.engines["a"].audit.view().checked == 1


async def test_the_salt_goes_along(world, servers):
    await finished(await world.warming.warm(Target(token_ids=tokens(48), cache_salt="s", engine="a")))
    assert servers[0].seen[0].json["cache_salt"] == "s"


async def test_extra_ids_go_along_or_it_is_not_supported(world, servers):
    prompt = Prompt(array("i", [600, *tokens(31)]), array("Q", [9] + [0] * 31))
    prefix = Prefix(world.pool, prompt, world.pool.chain(prompt), "token_ids")
    await world.warming.warm_on(prefix, world.engines["a"], OperationPart("a", "warm"))
    assert servers[0].seen[0].json["extra_ids"] == [9] + [0] * 31
    world.add(KvFake("c", NO_EVENTS - {Capability.EXTRA_IDS}))
    world.record("r1", None)
    world.record("r2", tokens(4), prompt_cache_key="k").prompt = prompt
    with pytest.raises(NotSupported, match="'extra_ids'"):
        await world.warming.warm(Target(prompt_cache_key="k", engine="c"))


async def test_an_engines_refusal_fails_it(world, servers):
    async def refuse(exchange):
        await exchange.send({"error": {"message": "too long"}}, 400)

    servers[0].script = refuse
    operation = await finished(await world.warming.warm(Target(token_ids=tokens(48), engine="a")))
    assert (operation.state, operation.parts[0].error) == (OperationState.FAILED, "too long")
    assert world.matched(tokens(48)) == {}


async def test_who_cannot_be_asked(world, servers):
    with pytest.raises(BadRequest) as caught:
        await world.warming.warm(Target(token_ids=tokens(48), engine="a"), everywhere=True)
    assert caught.value.param == "engines"
    with pytest.raises(BadRequest, match="needs a prefix"):
        await world.warming.warm(Target(all=True))
    world.engines["a"].state = EngineState.DRAINING
    with pytest.raises(NoEngine, match="'a'"):
        await world.warming.warm(Target(token_ids=tokens(48), engine="a"))
    world.engines["b"].state = EngineState.DOWN
    with pytest.raises(NoEngine):
        await world.warming.warm(Target(token_ids=tokens(48)))


async def test_an_engine_that_stays_away_fails_it(world, servers):
    warming = Warming(replace(world.flow, wait_s=0.01), world.targets, world.operations)
    world.engines["a"].state = EngineState.DOWN
    with pytest.raises(NoEngine):
        await warming.warm_on(prefix_of(world), world.engines["a"], OperationPart("a", "warm"))


async def test_it_waits_a_moment_for_an_engine_that_is_away(world, servers):
    world.engines["a"].state = EngineState.DOWN
    warming = asyncio.create_task(
        world.warming.warm_on(prefix_of(world), world.engines["a"], part := OperationPart("a", "warm"))
    )
    await asyncio.sleep(0)
    world.engines["a"].state = EngineState.READY
    await warming
    assert part.done == 2
    assert len(servers[0].seen) == 1


async def test_an_adapters_prefix_is_warmed_with_it(world, servers):
    async with FakeEngine("c") as server:
        world.add(KvFake("c", NO_EVENTS, loras=("ada",), url=server.url))
        operation = await world.warming.warm(Target(token_ids=tokens(48), model="ada"), everywhere=True)
        await finished(operation)
        assert [part.engine for part in operation.parts] == ["c"]
        assert server.seen[0].json["model"] == "ada"
    assert world.matched(tokens(48), lora="ada") == {"c": 3}
    assert world.matched(tokens(48)) == {}
    with pytest.raises(BadRequest):
        await world.warming.warm(Target(token_ids=tokens(48), model="ada", engine="a"))
