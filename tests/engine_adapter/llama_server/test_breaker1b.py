"""Faults that a breaker found: another tenant's KV."""

from __future__ import annotations

import asyncio

from engine_adapter import EngineUnavailable, KvVerb
from engine_adapter.llama_server.turns import SlotRequest
from tests.engine_adapter.llama_server.scheduler_world import NEVER_SENT, scheduler_world
from tests.engine_adapter.llama_server.slot_world import prompt_of, slot_world


async def test_a_request_that_never_left_gives_nobody_what_was_restored_for_it(start_llama, save_dir):
    """`/slots` tells no tokens of a slot that had no request yet, even after a restore: that is not empty."""
    server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
    async with scheduler_world(server) as world:
        entry = await world.saved_away(prompt_of(1, 300), "a")
        assert await world.restore(1, entry)
        lease = await world.ask(entry.tokens, "a", chunks=NEVER_SENT)
        assert lease.slot == 1
        print(world.table[0], world.table[1])
        leases = [asyncio.create_task(world.ask(prompt_of(1, 300), "b")) for _ in world.table]
        assert [(await lease).answer.cached_tokens for lease in leases] == [0, 0]


async def test_a_request_that_never_left_does_not_own_what_another_tenant_left(
    start_llama, save_dir, monkeypatch
):
    """The length of what lies there was a guess: that another one is found does not show that it ran."""
    server = start_llama(slots=1, ctx=1024, save_dir=save_dir)
    prompt = prompt_of(1, 300)
    async with scheduler_world(server) as world:
        async with world.scheduler.lease(SlotRequest(prompt, "a")) as lease:
            await world.complete(prompt, slot=lease.slot)  # its answer is lost
            monkeypatch.setattr(world.scheduler, "_count_when_idle", _fails)
        await world.idle()
        monkeypatch.undo()
        print(world.table[0].salt, world.table[0].length)
        await world.ask(prompt, "b", chunks=NEVER_SENT)
        print(world.table[0].salt, world.table[0].length, len(world.table[0].tokens))
        lease = await world.ask(prompt, "b")
        assert (lease.may_reuse, lease.answer.cached_tokens) == (False, 0)


async def _fails(_slot_id):
    raise EngineUnavailable("no answer")


async def test_a_refused_request_gives_nobody_what_was_restored_for_it(start_llama, save_dir):
    """The same through the adapter: a tenant's own request that the server refuses (400) is enough."""
    prompt, before = prompt_of(1, 300), start_llama(slots=2, ctx=1024, save_dir=save_dir)
    async with slot_world(before.url, host_cache_dir=str(save_dir)) as world:
        await world.ask(prompt, "a")
        await world.do(KvVerb.OFFLOAD)
    before.stop()
    server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        await world.ask(prompt_of(2, 300), "c")  # on the slot that was probed
        async with world.hold(prompt, "a", grammar="root ::= (") as hold:
            async with await world.sent(hold) as response:
                assert response.status == 400
            print(hold.slot, hold.cached_tokens)
        await world.until(lambda slots: all(slot["operation"] is None for slot in slots))
        print(await world.slots())
        cached = [(await world.ask(prompt, "b"))[1] for _ in range(2)]
    assert cached[0] == 0
