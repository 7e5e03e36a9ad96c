import asyncio
from array import array
from dataclasses import replace

import pytest

from engine_adapter import Capability, NotSupported
from proxy.control.kv import KvOrders
from proxy.control.operations import OperationPart, OperationState, Target
from proxy.control.target_engines import Prefix
from proxy.errors import BadRequest, NoEngine
from proxy.fleet.engine import EngineState
from proxy.prompt import Prompt
from tests.fakes import FakeEngine
from tests.kv_world import ALL, KvFake, finished, tokens

NO_EVENTS = ALL - {Capability.KV_EVENTS}


@pytest.fixture
async def servers(world):
    """Two engines on sockets."""
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        for server in (a, b):
            world.add(KvFake(server.id, NO_EVENTS, url=server.url))
        yield a, b


def prefix_of(world, prompt=None):
    """A prefix, of two blocks unless it is given."""
    prompt = prompt or Prompt(array("i", tokens(32)))
    return Prefix(world.pool, prompt, world.pool.chain(prompt), "token_ids")


async def test_one_token_is_asked_of_the_engine_placement_picks_and_the_index_learns(world, servers):
    a, b = servers
    world.served(world.engines["b"].adapter, tokens(32))
    operation = await finished(await world.kv.warm(Target(token_ids=tokens(48))))
    assert operation.state is OperationState.DONE
    assert (operation.parts[0].engine, operation.parts[0].done) == ("b", 3)
    assert not a.seen
    request = b.seen[0]
    assert (request.target, request.json["max_tokens"]) == ("/v1/completions", 1)
    assert request.json["prompt"] == tokens(48)
    assert request.headers["content-type"] == "application/json"
    assert "cache_salt" not in request.json
    assert world.matched(tokens(48)) == {"b": 3}
    engine = world.engines["b"]
    assert (engine.ledger.in_flight, engine.ledger.placed, engine.audit.view().checked) == (0, 1, 1)


async def test_the_page_is_not_told_of_it(world, servers):
    """It would never hear of its end."""
    viewer = world.proxy.live.join(snapshots=False)
    await finished(await world.kv.warm(Target(token_ids=tokens(48))))
    viewer.end()
    assert (await viewer.take(), world.proxy.live._followed) == (b"", set())


async def test_salt_and_extra_ids_go_along_or_it_is_not_supported(world, servers):
    await finished(await world.kv.warm(Target(token_ids=tokens(48), cache_salt="s", engine="a")))
    assert servers[0].seen[0].json["cache_salt"] == "s"
    prompt = Prompt(array("i", [600, *tokens(31)]), array("Q", [9] + [0] * 31))
    await world.kv.warm_on(prefix_of(world, prompt), world.engines["a"], OperationPart("a", "warm"))
    assert servers[0].seen[1].json["extra_ids"] == [9] + [0] * 31
    world.add(KvFake("c", NO_EVENTS - {Capability.EXTRA_IDS}))
    world.record("r1", None)
    world.record("r2", tokens(4), prompt_cache_key="k").prompt = prompt
    with pytest.raises(NotSupported, match="'extra_ids'"):
        await world.kv.warm(Target(prompt_cache_key="k", engine="c"))


async def test_an_engines_refusal_fails_it(world, servers):
    async def refuse(exchange):
        await exchange.send({"error": {"message": "too long"}}, 400)

    servers[0].script = refuse
    operation = await finished(await world.kv.warm(Target(token_ids=tokens(48), engine="a")))
    assert (operation.state, operation.parts[0].error) == (OperationState.FAILED, "too long")
    assert world.matched(tokens(48)) == {}


async def test_who_cannot_be_asked(world, servers):
    with pytest.raises(BadRequest) as caught:
        await world.kv.warm(Target(token_ids=tokens(48), engine="a"), everywhere=True)
    assert caught.value.param == "engines"
    with pytest.raises(BadRequest, match="needs a prefix"):
        await world.kv.warm(Target(all=True))
    world.engines["a"].state = EngineState.DRAINING
    with pytest.raises(NoEngine, match="'a'"):
        await world.kv.warm(Target(token_ids=tokens(48), engine="a"))
    world.engines["b"].state = EngineState.DOWN
    with pytest.raises(NoEngine):
        await world.kv.warm(Target(token_ids=tokens(48)))


async def test_it_waits_a_moment_for_an_engine_that_is_away(world, servers):
    away, part = world.engines["a"], OperationPart("a", "warm")
    away.state = EngineState.DOWN
    warming = KvOrders(world.fleet, replace(world.flow, wait_s=0.01), world.targets, world.operations)
    with pytest.raises(NoEngine):
        await warming.warm_on(prefix_of(world), away, OperationPart("a", "warm"))
    warming = asyncio.create_task(world.kv.warm_on(prefix_of(world), away, part))
    await asyncio.sleep(0)
    away.state = EngineState.READY
    await warming
    assert (part.done, len(servers[0].seen)) == (2, 1)


async def test_an_adapters_prefix_is_warmed_with_it(world, servers):
    async with FakeEngine("c") as server:
        world.add(KvFake("c", NO_EVENTS, loras=("ada",), url=server.url))
        operation = await world.kv.warm(Target(token_ids=tokens(48), model="ada"), everywhere=True)
        await finished(operation)
        assert [part.engine for part in operation.parts] == ["c"]
        assert server.seen[0].json["model"] == "ada"
    assert world.matched(tokens(48), lora="ada") == {"c": 3}
    assert world.matched(tokens(48)) == {}
    with pytest.raises(BadRequest):
        await world.kv.warm(Target(token_ids=tokens(48), model="ada", engine="a"))
