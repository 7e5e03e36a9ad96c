"""What slots hold when that is not sure: nobody gets moved KV for exact, or KV of another tenant."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain

import pytest

from engine_adapter import EngineLost, EngineUnavailable, KvTarget, KvVerb
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.checkpoints import PLAIN
from engine_adapter.llama_server.turns import SlotRequest
from tests.engine_adapter.llama_server.scheduler_world import NEVER_SENT, scheduler_world
from tests.engine_adapter.llama_server.slot_world import START, prompt_of, slot_world

PROMPT = prompt_of(1, 300)


@pytest.fixture
async def alone(start_llama, save_dir):
    async with scheduler_world(start_llama(slots=1, ctx=1024, save_dir=save_dir)) as world:
        yield world


@pytest.fixture
async def pair(start_llama, save_dir):
    """A scheduler of a server with two slots, and a file of tenant a's: `pair.entry`."""
    async with scheduler_world(start_llama(slots=2, ctx=1024, save_dir=save_dir)) as world:
        world.entry = await world.saved_away(PROMPT, "a")
        yield world


@asynccontextmanager
async def unanswered(world, monkeypatch):
    """The question what a slot holds after the request of this block fails."""

    async def fails(_slot_id):
        raise EngineUnavailable("no answer")

    with monkeypatch.context() as patch:
        yield lambda: patch.setattr(world.scheduler, "_count_when_idle", fails)
        await world.idle()


async def reused_by_another(world):
    """Tokens that tenant b reuses of the prompt, on each slot."""
    leases = [asyncio.create_task(world.ask(PROMPT, "b")) for _ in world.table]
    return [(await lease).answer.cached_tokens for lease in leases]


async def test_a_slot_whose_predictions_keep_failing_is_not_firm(alone):
    """The answer that shows it carries the old rules back into its slot."""
    alone.contents.learn(replace(alone.facts, memory=replace(PLAIN, chunk=16)))
    parts = [list(prompt_of(seed, 60)) for seed in range(8)]
    # `ask` sends no n_cache_reuse: as on a server that cannot move KV.
    prompts = [array("i", [*START, *chain.from_iterable(parts[turn:])]) for turn in range(7)]
    leases = [await alone.ask(prompt) for prompt in prompts]
    wrong = [lease.answer.cached_tokens < lease.cached_tokens for lease in leases]
    assert wrong == [False, *[True] * 6]
    assert not alone.contents.rules.is_sure
    assert [lease.firm for lease in leases] == [*[True] * 4, *[False] * 3]


class TestNobodyElseGetsWhatATenantLeft:
    async def test_after_a_text_whose_end_is_not_known(self, alone, monkeypatch):
        """As of `/infill`, whose tokens kvpin does not know."""
        lease = alone.scheduler.lease(SlotRequest(array("i"), "a", text=array("i", [1, 2, 3])))
        async with unanswered(alone, monkeypatch) as fail, lease as held:
            await alone.complete(PROMPT, slot=held.slot)
            fail()
        assert await reused_by_another(alone) == [0]

    async def test_by_a_request_that_never_left(self, alone, monkeypatch):
        """The length of what lies there was a guess: that another one is found does not show that it ran."""
        lease = alone.scheduler.lease(SlotRequest(PROMPT, "a"))
        async with unanswered(alone, monkeypatch) as fail, lease as held:
            await alone.complete(PROMPT, slot=held.slot)  # its answer is lost
            fail()
        await alone.ask(PROMPT, "b", chunks=NEVER_SENT)
        assert await reused_by_another(alone) == [0]


class TestNobodyElseGetsWhatWasRestored:
    """`/slots` tells no tokens of a slot that had no request yet, even after a restore: that is not empty."""

    async def test_by_a_restore_without_an_answer(self, pair, monkeypatch):
        restore = slot_io.restore

        async def unanswered(*args):
            await restore(*args)
            raise EngineLost("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(slot_io, "restore", unanswered)
            with pytest.raises(EngineLost):
                await pair.ask(PROMPT, "a")
        await pair.idle()
        assert await reused_by_another(pair) == [0, 0]

    async def test_for_a_request_that_never_left(self, pair):
        assert await pair.restore(1, pair.entry)
        assert (await pair.ask(pair.entry.tokens, "a", chunks=NEVER_SENT)).slot == 1
        assert await reused_by_another(pair) == [0, 0]

    async def test_for_a_request_that_the_server_refused(self, start_llama, save_dir):
        """Through the adapter: a tenant's own request that the server refuses (400) is enough."""
        before = start_llama(slots=2, ctx=1024, save_dir=save_dir)
        async with slot_world(before.url, host_cache_dir=str(save_dir)) as world:
            await world.ask(PROMPT, "a")
            await world.do(KvVerb.OFFLOAD)
        before.stop()
        server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            await world.ask(prompt_of(2, 300), "c")  # on the slot that was probed
            refused = world.hold(PROMPT, "a", grammar="root ::= (")
            async with refused as hold, await world.sent(hold) as response:
                assert response.status == 400
            await world.until_idle()
            assert (await world.ask(PROMPT, "b"))[1] == 0


async def test_the_end_of_a_pin_leaves_the_pin_of_another_engine_on_the_same_file(start_llama, save_dir):
    """Two servers share a directory, and so its saved prefixes."""
    servers = [start_llama(slots=1, ctx=1024, save_dir=save_dir) for _ in range(2)]
    async with (
        slot_world(servers[0].url, "one", host_cache_dir=str(save_dir)) as one,
        slot_world(servers[1].url, "two", host_cache_dir=str(save_dir)) as two,
    ):
        await one.ask(PROMPT)
        await one.do(KvVerb.OFFLOAD)
        mine = await one.adapter.pin(KvTarget(PROMPT), 100)
        await two.adapter.pin(KvTarget(PROMPT), 100)
        await one.adapter.unpin(mine.pin_id)
        done = await two.do(KvVerb.FLUSH, token_ids=PROMPT)
        assert done.left.get("pinned"), done
