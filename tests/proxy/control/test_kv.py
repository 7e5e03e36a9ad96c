import asyncio

import pytest

from engine_adapter import CacheCleared, Capability, KvVerb, ViewCurrent, ViewLost
from proxy.control.operations import OperationState, Target
from proxy.core.audit import Trust
from proxy.errors import BadRequest
from proxy.request.tenants import MAX_SALTS
from tests.kv_world import ALL, KvFake, finished, kv_world, tokens, until

NO_EVENTS = ALL - {Capability.KV_EVENTS}
KEYS = ({"key": "ka", "tenant": "alice"}, {"key": "kb", "tenant": "bob"})


@pytest.fixture
def learned(world):
    """Two engines whose views are learned from responses."""
    fakes = KvFake("a", NO_EVENTS), KvFake("b", NO_EVENTS)
    for fake in fakes:
        world.add(fake)
    return fakes


async def test_a_prefix_is_flushed_where_it_lies_and_nowhere_else(world, learned):
    a, b = learned
    world.served(a, tokens(64))
    world.served(b, tokens(64, start=9))
    operation = await finished(await world.kv.operate(KvVerb.FLUSH, Target(token_ids=tokens(40))))
    assert operation.state is OperationState.DONE
    part = {part.engine: part for part in operation.parts}["a"]
    assert (part.done, part.total, part.bytes) == (2, 2, 200)
    assert len(a.tiers) == 2
    assert len(b.tiers) == 4
    assert world.matched(tokens(64)) == {}
    assert world.matched(tokens(64, start=9)) == {"b": 4}
    (noted,) = world.engines["a"].flushed  # the cause of later misses
    assert list(noted.prefix.token_ids) == tokens(40)


async def test_a_flush_fails_for_engines_that_are_away_and_may_still_hold_the_kv(world, learned):
    a, b = learned
    for fake in learned:
        world.served(fake, tokens(64))
    world.fleet.leave(world.engines["a"])
    world.fleet.add(KvFake("elsewhere")).give_to("kvpin-2")
    world.fleet.add(KvFake("undecided")).give_to(None)
    prefix, everything = Target(token_ids=tokens(64)), Target(all=True)
    for target in (prefix, everything, Target(all=True, model=b.info.model)):
        operation = await finished(await world.kv.operate(KvVerb.FLUSH, target))
        assert {part.engine: part.error for part in operation.parts} == {
            "b": None,
            "a": "what it holds was not flushed, because it is not connected",
            "elsewhere": "what it holds was not flushed, because another kvpin uses it (kvpin-2)",
            "undecided": "what it holds was not flushed, because only one kvpin may use it, and it is not "
            "decided which one",
        }
        assert operation.state is OperationState.FAILED
        assert len(a.tiers) == 4
        assert not b.tiers
    alone = await finished(await world.kv.operate(KvVerb.FLUSH, Target(engine="b")))
    assert alone.state is OperationState.DONE
    others = await finished(await world.kv.operate(KvVerb.OFFLOAD, everything))
    assert [part.engine for part in others.parts] == ["b"]


@pytest.mark.parametrize("target", [Target(all=True), Target(token_ids=tokens(64))])
async def test_an_engine_that_leaves_before_its_part_begins_fails_only_that(world, learned, target):
    for fake in learned:
        world.served(fake, tokens(64))
    operation = await world.kv.operate(KvVerb.FLUSH, target)
    world.fleet.leave(world.engines["a"])
    errors = {part.engine: part.error for part in (await finished(operation)).parts}
    assert errors == {"a": "it is not connected any more", "b": None}
    assert not learned[1].tiers


async def test_a_flush_clears_the_view_before_it_is_done_and_can_be_cancelled_between_slices(world, learned):
    a, _ = learned
    world.served(a, tokens(64))
    a.gate.clear()
    operation = await world.kv.operate(KvVerb.FLUSH, Target(engine="a"))
    assert not await operation.wait(0.02)
    assert world.matched(tokens(64)) == {}
    assert operation.parts[0].total == 4
    world.operations.cancel(operation.operation_id)
    assert operation.state is operation.parts[0].state is OperationState.CANCELLED
    await asyncio.sleep(0.02)
    a.gate.set()
    await asyncio.sleep(0.02)
    assert len(a.tiers) == 4
    assert not world.engines["a"].flushed


async def test_what_just_ended_is_not_expected_back(world, learned):
    """A request's blocks stay pending for a moment after it: a flush must not wait for that."""
    prompt = world.served(learned[0], tokens(64))
    world.pool.index.add_pending("a", world.pool.chain(prompt).hashes)
    await finished(await world.kv.operate(KvVerb.FLUSH, Target(token_ids=tokens(64))))
    assert world.matched(tokens(64)) == {}


async def test_without_reuse_every_engine_is_asked(tokenizer_dir):
    async with kv_world(tokenizer_dir, reuse=False) as world:
        fake = KvFake("a")
        world.add(fake)
        world.served(fake, tokens(32))
        operation = await finished(await world.kv.operate(KvVerb.FLUSH, Target(token_ids=tokens(32))))
        assert operation.parts[0].done == 2


async def test_only_a_prefix_can_be_warmed_in_place_of_a_restore(world, pair):
    with pytest.raises(BadRequest) as caught:
        await world.kv.operate(KvVerb.RESTORE, Target(engine="a"), warm_instead=True)
    assert caught.value.param == "fallback"


@pytest.mark.parametrize("left", [1, 0])
async def test_what_a_flush_leaves_is_learned_again_from_events(world, pair, left):
    a, _ = pair
    engine = world.engines["a"]
    world.flow.attempts.ingest.follow(engine, world.pool)
    a.feed.put_nowait(ViewLost("connected"))
    a.feed.put_nowait(ViewCurrent())
    await until(lambda: engine.audit.trust is Trust.PRECISE)
    world.served(a, tokens(32))
    a.in_use.update([*a.tiers][:left])
    operation = await finished(await world.kv.operate(KvVerb.FLUSH, Target(engine="a")))
    assert operation.parts[0].left == {"in_use": left}
    await (until(lambda: a.subscriptions == 2) if left else asyncio.sleep(0.02))
    assert a.subscriptions == 1 + left


async def test_a_flush_that_is_cancelled_leaves_the_view_of_the_engine_that_came_in_place(world):
    old, new = KvFake("a"), KvFake("a")
    for each in (old, KvFake("b")):
        world.add(each)
    engine, ingest = world.engines["a"], world.flow.attempts.ingest
    engine.audit.synced()
    world.served(old, tokens(32))
    old.gate.clear()
    operation = await world.kv.operate(KvVerb.FLUSH, Target(engine="a"))
    assert not await operation.wait(0.02)
    world.fleet.remove(engine)
    world.add(new)
    ingest.follow(world.engines["a"], world.pool)
    await until(lambda: new.subscriptions == 1)
    world.operations.cancel(operation.operation_id)
    await asyncio.sleep(0.02)
    assert old.subscriptions == 0


async def test_a_flush_ends_the_pins_it_meets(world, learned):
    a, b = learned
    for fake in learned:
        world.served(fake, tokens(32))
    world.served(a, tokens(32, start=9))
    for ids in (tokens(32), tokens(32, start=9)):
        await finished(await world.kv.pin(Target(token_ids=ids), 60))
    await finished(await world.kv.operate(KvVerb.FLUSH, Target(token_ids=tokens(16), engine="a")))
    assert [held.engines for held in world.kv.active()] == [["b"], ["a"]]
    await finished(await world.kv.operate(KvVerb.FLUSH, Target(engine="a")))
    assert [held.engines for held in world.kv.active()] == [["b"]]
    assert b.pins


async def test_a_pin_that_a_flush_leaves_can_be_ended(world, learned):
    a, _ = learned
    world.served(a, tokens(32))
    pinned = await finished(await world.kv.pin(Target(token_ids=tokens(32)), 60))
    a.in_use.add(next(iter(a.tiers)))  # a llama-server leaves what is pinned in the same way
    for target in (Target(token_ids=tokens(32)), Target(engine="a")):
        await finished(await world.kv.operate(KvVerb.FLUSH, target))
        assert [held.engines for held in world.kv.active()] == [["a"]]
    await finished(world.kv.unpin(pinned.result["pin_id"]))
    assert (world.kv.active(), a.pins) == ([], {})


async def test_a_tenants_kv_and_pins_and_nobody_elses(tokenizer_dir):
    async with kv_world(tokenizer_dir, api_keys=KEYS) as world:
        fake, salts, pins = KvFake("a", NO_EVENTS), [], []
        world.add(fake)
        for tenant, name in (("alice", None), ("alice", "x"), ("bob", None)):
            salts.append(world.tenants.salt(tenant, name))
            world.served(fake, tokens(32), salts[-1])
            world.engines["a"].salts.note(tenant, salts[-1])
            target = Target(token_ids=tokens(32), tenant=tenant, cache_salt=name)
            pins.append((await finished(await world.kv.pin(target, 60))).result["pin_id"])
        await finished(await world.kv.operate(KvVerb.FLUSH, Target(tenant="alice", cache_salt="x")))
        assert [pin.pin_id for pin in world.kv.active()] == [pins[0], pins[2]]
        world.served(fake, tokens(32), salts[1])
        operation = await finished(await world.kv.operate(KvVerb.FLUSH, Target(tenant="alice")))
        part = operation.parts[0]
        assert (part.done, part.total, part.bytes) == (4, 4, 400)
        assert {block[0] for block in fake.tiers} == {salts[2]}
        # Whose block a hash is cannot be told: the learned view of the engine starts over.
        assert world.matched(tokens(32), salts[1]) == {}
        assert [pin.pin_id for pin in world.kv.active()] == pins[2:]


class TestForgottenSalts:
    """More cache salts than are remembered: a tenant's flush must not call itself sure."""

    @pytest.fixture
    async def shared(self, tokenizer_dir):
        """An engine whose every event was seen, with KV of alice's and more salts of bob's than are kept."""
        async with kv_world(tokenizer_dir, api_keys=KEYS) as world:
            fake = KvFake("a")
            engine = world.add(fake)
            world.flow.attempts.ingest.follow(engine, world.pool)
            fake.feed.put_nowait(CacheCleared())
            fake.feed.put_nowait(ViewCurrent())
            await until(lambda: engine.audit.trust is Trust.PRECISE)
            for tenant, name in (("alice", "x"), ("bob", "first")):
                salt = world.tenants.salt(tenant, name)
                world.served(fake, tokens(32), salt)
                engine.salts.note(tenant, salt)
            for n in range(MAX_SALTS):
                engine.salts.note("bob", world.tenants.salt("bob", str(n)))
            yield world, fake

    async def flushed(self, world, **target):
        return await finished(await world.kv.operate(KvVerb.FLUSH, Target(**target)))

    async def test_the_answer_says_that_salts_were_forgotten_and_another_tenants_flush_is_whole(self, shared):
        world, fake = shared
        assert "flush the whole engine to be sure" in (await self.flushed(world, tenant="bob")).note
        assert len(fake.tiers) == 4  # bob's first salt is forgotten, and its KV is missed
        operation = await self.flushed(world, tenant="alice")
        assert (operation.parts[0].done, operation.note) == (2, None)
        assert {block[0] for block in fake.tiers} == {world.tenants.salt("bob", "first")}
        assert (await self.flushed(world, tenant="bob", cache_salt="first")).note is None

    async def test_after_a_flush_of_the_engine_it_is_sure_again_unless_the_view_is_lost(self, shared):
        world, fake = shared
        fake.in_use.add(next(iter(fake.tiers)))
        await self.flushed(world, engine="a")
        assert (await self.flushed(world, tenant="bob")).note is not None
        fake.in_use.clear()
        await self.flushed(world, engine="a")
        await until(lambda: fake.subscriptions == 2)
        fake.feed.put_nowait(CacheCleared())
        await until(lambda: world.engines["a"].view.complete)
        assert (await self.flushed(world, tenant="bob")).note is None
        fake.feed.put_nowait(ViewLost("connected"))  # it may hold KV of before
        await until(lambda: not world.engines["a"].view.complete)
        assert "tenant on a, and may have missed" in (await self.flushed(world, tenant="alice")).note
        moved = await finished(await world.kv.operate(KvVerb.OFFLOAD, Target(tenant="alice")))
        assert moved.note.endswith("some of its KV there")
