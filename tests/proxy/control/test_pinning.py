from dataclasses import replace

import msgspec
import pytest

from engine_adapter import Capability, EngineUnavailable, NotSupported
from proxy.control.operations import OperationState, Target
from proxy.errors import BadRequest, NotFound
from tests.kv_world import ALL, KvFake, finished, tokens


@pytest.fixture
async def pinned(world, pair):
    """A prefix that both engines hold was pinned for 60 s: the operation."""
    for fake in pair:
        world.served(fake, tokens(32))
    return await finished(await world.kv.pin(Target(token_ids=tokens(40)), 60))


async def test_a_pin_holds_on_every_engine_that_holds_the_prefix_until_its_time_is_over(world, pair, pinned):
    assert (pinned.state, pinned.result["blocks"]) == (OperationState.DONE, 4)
    assert [len(fake.pins) for fake in pair] == [1, 1]
    (held,) = world.kv.active()
    assert msgspec.to_builtins(held) == {
        "pin_id": pinned.result["pin_id"],
        "target": "token_ids (40 tokens)",
        "engines": ["a", "b"],
        "blocks": 4,
        "expires_in_s": 60,
        "kvpin": None,
    }
    world.now += 60
    assert world.kv.active() == []
    with pytest.raises(NotFound):
        world.kv.unpin(pinned.result["pin_id"])


async def test_unpin_lets_go_everywhere(world, pair, pinned):
    pin_id = pinned.result["pin_id"]
    operation = await finished(world.kv.unpin(pin_id))
    assert operation.result == {"pin_id": pin_id, "unpinned": True}
    assert [fake.pins for fake in pair] == [{}, {}]
    with pytest.raises(NotFound) as caught:
        world.kv.unpin(pin_id)
    assert caught.value.param == "pin_id"


async def test_an_engine_that_does_not_let_go_can_be_asked_again(world, pair, pinned):
    pair[0].failure = EngineUnavailable("gone")
    operation = await finished(world.kv.unpin(pinned.result["pin_id"]))
    assert operation.state is OperationState.FAILED
    assert [held.engines for held in world.kv.active()] == [["a"]]
    pair[0].failure = None
    assert (await finished(world.kv.unpin(pinned.result["pin_id"]))).result["unpinned"]
    assert not pair[0].pins


async def test_one_engine_fails_and_the_other_holds(world, pair):
    for fake in pair:
        world.served(fake, tokens(32))
    pair[0].failure = EngineUnavailable("gone")
    operation = await finished(await world.kv.pin(Target(token_ids=tokens(40)), 60))
    assert [part.state for part in operation.parts] == [OperationState.FAILED, OperationState.DONE]
    assert (operation.state, operation.error) == (OperationState.FAILED, "1 of 2 engines failed: a: gone")
    assert operation.result["pin_id"]
    assert [held.engines for held in world.kv.active()] == [["b"]]


async def test_a_restart_ends_the_pins_on_that_engine(world, pinned):
    engine = world.engines["a"]
    engine.info = replace(engine.info, instance="another")
    assert [held.engines for held in world.kv.active()] == [["b"]]
    world.fleet.remove(world.fleet.engine("b"))
    assert world.kv.active() == []


async def test_pins_that_an_adapter_kept_end_with_it(world, pair, pinned):
    """As those at LMCache's coordinator, when a reload changes the engine."""
    pair[0].pins.clear()
    pair[0].holds_pin = pair[0].pins.__contains__
    assert [held.engines for held in world.kv.active()] == [["b"]]
    await finished(world.kv.unpin(pinned.result["pin_id"]))
    assert not pair[1].pins


async def test_what_cannot_be_pinned(world):
    world.add(KvFake("a", ALL - {Capability.PIN}))
    with pytest.raises(BadRequest) as caught:
        await world.kv.pin(Target(engine="a"), 60)
    assert caught.value.param == "engine"
    with pytest.raises(NotSupported, match="'pin'"):
        await world.kv.pin(Target(token_ids=tokens(32), engine="a"), 60)
