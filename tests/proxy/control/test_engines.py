from dataclasses import replace

import msgspec
import pytest

from engine_adapter import EngineUnavailable, KvVerb, Role
from proxy.control.engines import describe_drained, describe_engine, stats
from proxy.control.operations import Target
from proxy.errors import Conflict
from proxy.fleet.engine import DrainReason, EngineState
from proxy.settings import EngineSettings
from tests.kv_world import tokens, until


def named(engine_id, url, **more):
    return EngineSettings(kind="openai_compatible", url=url, id=engine_id, **more)


async def test_an_address_of_several_engines_is_refused_with_all_of_them(world):
    engines, router = world.proxy.engines, named("r-chat", "http://127.0.0.1:1", model="chat")
    engines.add(router)
    engines.add(router.model_copy(update={"id": "r-code", "model": "code"}))
    with pytest.raises(Conflict) as caught:
        engines.add(router.model_copy(update={"id": "r", "model": None}))
    assert str(caught.value) == (
        "engines 'r-chat', 'r-code', its ranks or models, are already at http://127.0.0.1:1"
    )
    with pytest.raises(Conflict, match=r"^engine 'r-code' is already at "):
        engines.add(router.model_copy(update={"id": "r", "model": "code"}))


async def test_a_removed_engine_ends_its_part_of_operations(world, pair):
    a, b = pair
    for fake in pair:
        world.served(fake, tokens(32))
    a.gate.clear()
    operation = await world.kv.operate(KvVerb.FLUSH, Target(all=True))
    await until(lambda: not b.tiers)
    removed = world.fleet.engine("a")
    await world.proxy.engines.remove(removed)
    assert await operation.wait(5)
    assert operation.error == "1 of 2 engines failed: a: the engine was removed"
    assert a.closed
    await world.proxy.engines.remove(removed)  # a second time has no effect


async def test_its_role_and_what_it_lacks_are_told(world, pair):
    engine = world.engines["a"]
    told = describe_engine(engine, world.pool)
    assert (told.role, told.findings) == (Role.BOTH, [])
    engine.info = replace(engine.info, role=Role.DECODE)
    told = describe_engine(engine, world.pool)
    assert told.role is Role.DECODE
    assert "no engine of its model with role=prefill is connected" in told.findings[0]


async def test_an_end_of_draining_lets_no_requests_in_where_none_may_be(world, pair, monkeypatch):
    drain, (a, b) = world.proxy.engines.drain_for, world.engines.values()
    for engine in (a, b):
        drain(engine, {DrainReason.ORDERED})
    world.fleet.leave(a)
    monkeypatch.setattr(world.proxy.monitor, "allows", lambda _: False)
    for engine in (a, b):
        drain(engine, set())
    assert (a.state, b.state) == (EngineState.DOWN, EngineState.REFUSED)
    assert world.pool.candidates(None) == []


@pytest.mark.parametrize("n_left", [1, 0])
async def test_an_undo_that_changes_nothing_says_why(world, pair, n_left):
    """Also while other engines take requests for the model."""
    for engine in [*world.engines.values()][n_left:]:
        world.proxy.engines.drain_for(engine, {DrainReason.LEAVING})
    warning = describe_drained(world.engines["b"], world.fleet, is_told=True).warning
    assert warning.startswith("b drains whatever is ordered: nothing names it any more")
    assert ("no engine takes requests for" in warning) is (n_left == 0)


async def test_an_order_that_others_do_not_hear_of_is_told(world, pair):
    warning = "the exchange is gone: other kvpins follow this order when it is back"
    for engine, more in zip(world.engines.values(), ("", "ends that; "), strict=True):
        world.proxy.engines.drain(engine, undo=False)
        told = describe_drained(engine, world.fleet, is_told=False).warning
        assert told.endswith(f"{more}{warning}")
    assert "exchange" not in describe_drained(engine, world.fleet, is_told=True).warning


async def shown_by(world):
    return msgspec.to_builtins(await stats(world.fleet, world.kv.active(), reuse=world.reuse))


async def test_pools_engines_and_totals(world, pair):
    world.served(pair[0], tokens(64))
    world.engines["a"].audit.observe(32, 48)
    pair[1].failure = EngineUnavailable("gone")  # it is shown all the same
    shown = await shown_by(world)
    (pool,) = shown["pools"]
    assert (pool["model"], pool["index_entries"], pool["tokens_per_block"]) == ("m", 4, 16)
    first, second = pool["engines"]
    assert first["blocks"] == {"gpu": 4, "host": 0, "disk": 0}
    assert (first["kv"], first["kv_error"]) == ({"gpu": {"cached": 4}}, None)
    assert (first["trust"], first["why"]) == ("approximate", "no events yet: learning from responses")
    assert first["audit"]["reported_tokens"] == 48
    assert (second["blocks"]["gpu"], second["kv"], second["kv_error"]) == (0, {}, "gone")
    totals = shown["totals"]
    assert (totals["engines"], totals["ready"], totals["predicted_cached_tokens"]) == (2, 2, 32)
    assert shown["reuse"]


async def test_how_prompts_become_tokens(world, pair):
    world.pool.prompts.ask_engines("why")
    world.pool.prompts.agreed = 3
    (pool,) = (await shown_by(world))["pools"]
    forms = pool["tokenisation"].pop("forms")
    assert pool["tokenisation"].pop("detail").startswith("the engine tokenises each prompt: ")
    assert pool["tokenisation"] == {"ok": True, "source": "engine", "agreed": 3, "differed": 0}
    assert forms["text parts"] == {
        "source": "engine", "ok": True, "detail": "why", "agreed": 0, "differed": 0
    }  # fmt: skip
    world.pool.renderings = ()
    (pool,) = (await shown_by(world))["pools"]
    assert pool["tokenisation"] is None
