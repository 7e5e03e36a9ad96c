from dataclasses import replace

import pytest

from engine_adapter import EngineSpec, EngineSpecError, KvVerb, Role
from proxy.control.engines import describe_drained, describe_engine
from proxy.control.target import Target
from proxy.errors import Conflict
from proxy.fleet.engine import DrainReason, EngineState
from proxy.fleet.process.managed_engine import ManagedEngine
from proxy.settings import ManagedSettings
from tests.fakes import FakeEngine
from tests.kv_world import KvFake, tokens, until


async def test_an_added_engine_is_looked_after(world):
    async with FakeEngine("a") as server:
        engine = world.engine_set.add(EngineSpec("openai_compatible", server.url, "new"))
        assert engine.state is EngineState.CONNECTING
        await until(lambda: engine.state is EngineState.READY)
        assert world.fleet.pool("m").engines["new"] is engine
        with pytest.raises(Conflict) as caught:
            world.engine_set.add(EngineSpec("openai_compatible", server.url, "new"))
        assert caught.value.param == "id"
        with pytest.raises(Conflict, match="engine 'new' is already at ") as caught:
            world.engine_set.add(EngineSpec("vllm", server.url.replace("127.0.0.1", "localhost"), "other"))
        assert caught.value.param == "url"
        await world.engine_set.remove(world.fleet.engine("new"))
        assert world.fleet.engines == {}


async def test_an_address_of_several_engines_is_refused_with_all_of_them(world):
    router = EngineSpec("openai_compatible", "http://127.0.0.1:1", "r-chat", model="chat")
    world.engine_set.add(router)
    world.engine_set.add(replace(router, id="r-code", model="code"))
    with pytest.raises(Conflict) as caught:
        world.engine_set.add(replace(router, id="r", model=None))
    assert str(caught.value) == (
        "engines 'r-chat', 'r-code', its ranks or models, are already at http://127.0.0.1:1"
    )
    with pytest.raises(Conflict, match=r"^engine 'r-code' is already at "):
        world.engine_set.add(replace(router, id="r", model="code"))


async def test_an_unknown_kind_is_refused(world):
    with pytest.raises(EngineSpecError, match="teapot"):
        world.engine_set.add(EngineSpec("teapot", "http://127.0.0.1:1", "x"))
    assert world.fleet.engines == {}


async def test_free_ids(world, pair):
    world.add(KvFake("vllm-0"))
    assert world.engine_set.free_id("vllm") == "vllm-1"
    assert world.engine_set.free_id("nim") == "nim-0"


async def test_a_removed_engine_ends_its_part_of_operations(world, pair):
    a, b = pair
    for fake in pair:
        world.served(fake, tokens(32))
    a.gate.clear()
    operation = await world.kv.operate(KvVerb.FLUSH, Target(all=True))
    await until(lambda: not b.tiers)
    removed = world.fleet.engine("a")
    await world.engine_set.remove(removed)
    assert await operation.wait(5)
    assert operation.error == "1 of 2 engines failed: a: the engine was removed"
    assert a.closed
    await world.engine_set.remove(removed)  # a second time has no effect


async def test_its_role_and_what_it_lacks_are_told(world, pair):
    engine = world.engines["a"]
    assert (describe_engine(engine, world.pool).role, describe_engine(engine, world.pool).findings) == (
        Role.BOTH,
        [],
    )
    engine.info = replace(engine.info, role=Role.DECODE)
    assert describe_engine(engine, world.pool).role is Role.DECODE
    (finding,) = describe_engine(engine, world.pool).findings
    assert "no engine of its model with role=prefill is connected" in finding


async def test_the_process_of_an_engine_is_described(world, pair):
    process = world.engines["a"].process = ManagedEngine(ManagedSettings(kind="embedded", id="a"))
    shown = describe_engine(world.engines["a"], world.pool).process
    assert (shown["state"], shown["port"], shown["pid"]) == ("stopped", process.port, None)
    assert describe_engine(world.engines["b"], world.pool).process is None


async def test_why_its_process_does_not_run_is_its_last_error(world, pair, monkeypatch):
    process = world.engines["a"].process = ManagedEngine(ManagedSettings(kind="embedded", id="a"))
    world.engines["a"].last_error = "GET /kv/info: cannot connect"
    assert describe_engine(world.engines["a"], world.pool).last_error == "GET /kv/info: cannot connect"
    monkeypatch.setattr(process, "_error", "exit code 2")
    assert describe_engine(world.engines["a"], world.pool).last_error == "exit code 2"


async def test_draining_and_back(world, pair):
    engine = world.engine_set.drain(world.fleet.engine("a"), DrainReason.ORDERED, undo=False)
    assert engine.state is EngineState.DRAINING
    assert [candidate.engine for candidate in world.pool.candidates(None)] == ["b"]
    world.engine_set.drain(world.fleet.engine("a"), DrainReason.ORDERED, undo=True)
    # It is asked before it is trusted.
    assert engine.state is EngineState.SUSPECT
    assert engine.check_now.is_set()
    assert (
        world.engine_set.drain(world.fleet.engine("b"), DrainReason.ORDERED, undo=True).state
        is EngineState.READY
    )


async def test_undo_on_an_engine_that_is_refused_does_not_let_requests_in(world, pair, monkeypatch):
    monkeypatch.setattr(world.engine_set._monitor, "allows", lambda _: False)
    for name in "ab":
        world.engine_set.drain(world.fleet.engine(name), DrainReason.ORDERED, undo=False)
        assert (
            world.engine_set.drain(world.fleet.engine(name), DrainReason.ORDERED, undo=True).state
            is EngineState.REFUSED
        )
    assert world.pool.candidates(None) == []


async def test_an_engine_takes_requests_when_no_reason_to_drain_is_left(world, pair):
    engine, drain = world.engines["a"], world.engine_set.drain
    drain(engine, DrainReason.LEAVING, undo=False)
    world.orders.drain(engine, undo=True)  # an operator never ordered it
    assert engine.state is EngineState.DRAINING
    world.orders.drain(engine, undo=False)
    drain(engine, DrainReason.NOT_READY, undo=False)
    for why in (DrainReason.LEAVING, DrainReason.NOT_READY):
        assert drain(engine, why, undo=True).state is EngineState.DRAINING
    assert world.orders.drain(engine, undo=True).state is EngineState.SUSPECT


async def test_an_undo_that_changes_nothing_says_why(world, pair):
    for engine in world.engines.values():
        world.engine_set.drain(engine, DrainReason.LEAVING, undo=False)
    undone = world.orders.drain(world.engines["a"], undo=True)
    warning = describe_drained(undone, world.fleet, is_told=True).warning
    assert warning.endswith("a also drains for another reason: nothing names it any more")


async def test_undo_on_an_engine_that_is_gone(world, pair):
    world.engine_set.drain(world.fleet.engine("a"), DrainReason.ORDERED, undo=False)
    world.fleet.leave(world.engines["a"])
    assert (
        world.engine_set.drain(world.fleet.engine("a"), DrainReason.ORDERED, undo=True).state
        is EngineState.DOWN
    )


async def test_an_order_that_others_do_not_hear_of_is_told(world, pair):
    engine = world.engine_set.drain(world.fleet.engine("a"), DrainReason.ORDERED, undo=False)
    assert describe_drained(engine, world.fleet, is_told=True).warning is None
    warning = "the exchange is gone: other kvpins follow this order when it is back"
    assert describe_drained(engine, world.fleet, is_told=False).warning == warning
    last = world.engine_set.drain(world.fleet.engine("b"), DrainReason.ORDERED, undo=False)
    assert describe_drained(last, world.fleet, is_told=False).warning.endswith(f"--undo ends that; {warning}")


async def test_its_key_is_not_shown(world):
    fake = KvFake("a", api_key="secret")
    assert "secret" not in str(describe_engine(world.add(fake), world.pool))
