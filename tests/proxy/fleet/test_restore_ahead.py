"""What is restored ahead, on engines whose caches are sets in memory."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from math import inf

import pytest
from msgspec import structs

from engine_adapter import Capability, EngineUnavailable, Tier
from proxy.core.placement.load import Work
from proxy.fleet import lower_tiers
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.lower_tiers import LOOK_S, MOST_TIME, RestoreAhead
from proxy.prompt import Prompt
from proxy.request.records import RequestRecord
from proxy.runtime import Supervisor
from tests.fakes import INFO
from tests.kv_world import KvFake, until

BLOCKS = 4


class World:
    """An engine of eight blocks over a host tier, with a proxy that looks at it by a clock of the test's."""

    def __init__(self, **info):
        self.now = 1000.0
        self.fleet, self.tasks = Fleet(), Supervisor()
        self.ahead = RestoreAhead(self.fleet, self.tasks, clock=lambda: self.now)
        self.adapter = KvFake("a")
        self.engine = self.fleet.add(self.adapter)
        given = {"capabilities": frozenset(Capability), "gpu_blocks": 8, "host_blocks": 64} | info
        self.pool = self.fleet.join(self.engine, replace(INFO, **given))
        self.engine.state = EngineState.READY
        self.turns = {}

    def prompt(self, name):
        turn = self.turns.get(name, 0)
        return Prompt(array("i", [1000 * name + n for n in range(16 * (BLOCKS + turn))]))

    def last_prompt(self, name):
        """What was asked last."""
        return Prompt(self.prompt(name).token_ids[:-16])

    def answer(self, name, *, took_s=1.0, tier=Tier.GPU, **fields):
        """The next turn of a conversation is answered; what it left lies on `tier`."""
        prompt = self.prompt(name)
        chain = self.pool.chain(prompt)
        candidates = self.pool.candidates(chain, prompt)
        placement = self.pool.place(candidates, chain)
        record = RequestRecord("r", 0.0, "/v1/x", "m", None, stream=True, prompt=prompt, placement=placement)
        record.chain, record.duration_s = chain, took_s
        for field, value in fields.items():
            setattr(record, field, value)
        self.ahead.observe(record)
        self.turns[name] = self.turns.get(name, 0) + 1
        self.put(prompt, tier)

    def put(self, prompt, tier):
        """All of a prompt lies on one tier now."""
        hashes = self.pool.chain(prompt).hashes
        for each in Tier:
            self.pool.index.remove("a", each, hashes)
        self.pool.index.store("a", tier, hashes)
        self.adapter.keep(prompt, tier.value)

    def talk(self, name, turns=3, pause_s=9.0, tier=Tier.HOST):
        """A conversation with a rhythm, half a second before it is due again."""
        for turn in range(turns):
            if turn:
                self.now += pause_s + 1.0
            self.answer(name, tier=tier)
        self.now += pause_s - 0.5

    def on_gpu(self):
        """Blocks of prompts that are known to lie on the GPU."""
        return self.pool.placer.books["a"].on_gpu.lost(self.now, 1000, lambda _idle_s: 1.0)

    async def tick(self):
        """One look, and all it began."""
        self.ahead.tick()
        await self.until_quiet()

    async def until_quiet(self):
        while inf in self.ahead._not_before.values():  # noqa: ASYNC110 - tasks of the supervisor
            await asyncio.sleep(0)

    @property
    def restored(self):
        """How often, of all the engine was asked."""
        return len(self.adapter.targets)

    @property
    def counts(self):
        ahead = self.engine.ahead
        return ahead.restores, ahead.used, ahead.wasted


@pytest.fixture
async def world():
    world = World()
    yield world
    await world.tasks.stop()


async def test_what_is_due_comes_back_before_it_is_asked_for_and_is_known_to_lie_on_the_gpu(world):
    world.talk(1)
    hashes = world.pool.chain(world.last_prompt(1)).hashes
    await world.tick()
    (target,) = world.adapter.targets
    assert target.token_ids == world.last_prompt(1).token_ids
    assert set(world.adapter.tiers.values()) == {"gpu"}
    assert (world.counts, world.engine.ahead.blocks) == ((1, 0, 0), 6)
    world.pool.index.store("a", Tier.GPU, hashes)
    assert world.on_gpu() == len(hashes) == 6


async def test_of_what_lay_there_in_part_the_rest_came_back(world):
    world.talk(1)
    hashes = world.pool.chain(world.last_prompt(1)).hashes
    world.pool.index.store("a", Tier.GPU, hashes[:2])
    world.adapter.keep(Prompt(world.last_prompt(1).token_ids[:32]), "gpu")
    await world.tick()
    world.pool.index.store("a", Tier.GPU, hashes)
    assert (world.on_gpu(), world.engine.ahead.blocks) == (4, 4)


@pytest.mark.parametrize("gone", ["its KV", "its pool"])
async def test_what_is_gone_cannot_come_back(world, gone):
    world.talk(1)
    world.pool.wipe(world.engine) if gone == "its KV" else world.fleet.remove(world.engine)
    await world.tick()
    assert world.restored == 0


async def test_the_turn_that_finds_it_there_used_it(world):
    world.talk(1)
    await world.tick()
    world.put(world.prompt(1), Tier.GPU)
    world.answer(1)
    assert world.counts == (1, 1, 0)


@pytest.mark.parametrize("failure", [None, EngineUnavailable("gone")], ids=["restored", "failed"])
async def test_a_turn_that_does_not_come_wasted_it(world, failure):
    world.talk(1)
    world.adapter.failure = failure
    await world.tick()
    assert world.counts == (1, 0, 0)
    world.now += 60.0
    await world.tick()
    assert world.counts == (1, 0, 1)
    world.answer(1)
    assert world.counts == (1, 0, 1)


async def test_an_engine_that_computes_a_prompt_is_left_alone(world):
    world.talk(1)
    placed = world.engine.ledger.begin(world.now, 5.0, Work(100))
    await world.tick()
    assert world.restored == 0
    world.engine.ledger.first_token(world.now, placed)
    await world.tick()
    assert world.restored == 1


async def test_a_prompt_that_comes_ends_a_restore_after_its_slice(world):
    world.talk(1)
    world.adapter.gate.clear()
    world.ahead.tick()
    await asyncio.sleep(0)
    world.engine.ledger.begin(world.now, 5.0, Work(100))
    world.adapter.gate.set()
    await world.until_quiet()
    left = list(world.adapter.tiers.values()).count("host")
    assert 0 < left < 6
    assert world.counts == (1, 0, 0)
    world.pool.index.store("a", Tier.GPU, world.pool.chain(world.last_prompt(1)).hashes[: 6 - left])
    assert world.on_gpu() == world.engine.ahead.blocks > 0


async def test_one_at_a_time_and_no_more_than_a_part_of_the_time(world):
    world.talk(1, pause_s=9.0)
    world.now -= 29.0
    world.talk(2, pause_s=9.0)
    world.adapter.gate.clear()
    world.ahead.tick()
    await asyncio.sleep(0)
    world.ahead.tick()
    await asyncio.sleep(0)
    assert world.restored == 1
    world.now += 0.1
    world.adapter.gate.set()
    await world.until_quiet()
    await world.tick()
    assert world.restored == 1
    world.now += 0.1 / MOST_TIME
    await world.tick()
    assert world.restored == 2


async def test_what_would_leave_the_gpu_may_be_worth_more(world, monkeypatch):
    world.talk(1)
    other = world.prompt(6)
    world.put(other, Tier.GPU)
    hashes = world.pool.chain(other).hashes
    # It takes all of the GPU, and is asked for again within any time.
    world.pool.index.store("a", Tier.GPU, range(4))
    world.pool.placer.books["a"].on_gpu.use(world.now, hashes, 4)
    monkeypatch.setattr(world.pool.placer.demand, "returns", lambda idle_s: 0.5 / (1 + idle_s))
    soon = lower_tiers.soon
    monkeypatch.setattr(lower_tiers, "soon", lambda *_: 1.0)
    await world.tick()
    assert world.restored == 0
    monkeypatch.setattr(lower_tiers, "soon", soon)
    await world.tick()
    assert world.restored == 1


async def test_a_tick_looks_at_no_more_than_there_is_time_for(world, monkeypatch):
    for name in (1, 2, 3):
        world.talk(name)
        world.now -= 29.0
    world.now += 29.5
    world.engine.ledger.begin(world.now, 5.0, Work(100))
    looked_at, match = [], world.pool.index.match

    def slowly(hashes):
        looked_at.append(hashes)
        world.now += LOOK_S / 2
        return match(hashes)

    monkeypatch.setattr(world.pool.index, "match", slowly)
    for ticks in (1, 2, 3):
        world.ahead.tick()
        assert len(looked_at) == 2 * ticks
    assert looked_at[:3] == looked_at[3:]
    assert len(set(looked_at)) == 3


@pytest.mark.parametrize("likeliest", [1, 2])
async def test_of_several_the_likeliest_comes_first(world, likeliest):
    world.talk(1)
    world.now -= 28.5
    world.talk(2)
    other = world.ahead._threads._threads[world.pool.chain(world.last_prompt(3 - likeliest)).hashes[-1]]
    other.gaps = (9.0, 9.0, 9.0, 60.0, 60.0)
    await world.tick()
    (target,) = world.adapter.targets
    assert target.token_ids == world.last_prompt(likeliest).token_ids


@pytest.mark.parametrize(
    "info",
    [
        {"host_blocks": None},
        {"host_blocks": 0},
        {"capabilities": frozenset(Capability) - {Capability.RESTORE}},
    ],
)
async def test_engines_without_a_tier_to_restore_from_are_not_followed(info):
    world = World(**info)
    world.talk(1)
    await world.tick()
    assert (world.restored, len(world.ahead._threads._threads)) == (0, 0)


async def test_a_prompt_known_in_part_is_no_turn(world):
    world.prompt = lambda _name: structs.replace(Prompt(array("i", range(64))), whole=False)
    world.answer(1)
    assert len(world.ahead._threads._threads) == 0


async def test_it_looks_again_and_again(virtual_time, world):
    world.talk(1)
    world.tasks.keep("restore ahead", world.ahead.run)
    await until(lambda: world.restored, 20)
    assert world.counts == (1, 0, 0)
