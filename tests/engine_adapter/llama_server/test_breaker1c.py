"""Faults that a breaker found: pins."""

from __future__ import annotations

from engine_adapter import KvTarget, KvVerb
from tests.engine_adapter.llama_server.slot_world import prompt_of, slot_world


async def test_the_end_of_a_pin_leaves_the_pin_of_another_engine_on_the_same_file(start_llama, save_dir):
    """Two servers share a directory, and so its saved prefixes."""
    servers = [start_llama(slots=1, ctx=1024, save_dir=save_dir) for _ in range(2)]
    prompt = prompt_of(1, 300)
    async with (
        slot_world(servers[0].url, "one", host_cache_dir=str(save_dir)) as one,
        slot_world(servers[1].url, "two", host_cache_dir=str(save_dir)) as two,
    ):
        await one.ask(prompt)
        await one.do(KvVerb.OFFLOAD)
        mine = await one.adapter.pin(KvTarget(prompt), 100)
        await two.adapter.pin(KvTarget(prompt), 100)
        await one.adapter.unpin(mine.pin_id)
        done = await two.do(KvVerb.FLUSH, token_ids=prompt)
        assert done.left.get("pinned"), done
