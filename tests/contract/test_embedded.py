"""What only the embedded engine can do, through its adapter: events, tables, pins, offload, its end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
import torch
from safetensors.torch import save

from engine_adapter import (
    CacheCleared,
    Capability,
    EngineRejected,
    EngineUnavailable,
    KvTarget,
    KvVerb,
    NotSupported,
    PromptTable,
    Tier,
    ViewCurrent,
    ViewLost,
)
from engine_adapter.events.wire import decode_snapshot
from engine_adapter.http.control import ControlClient
from engine_adapter.types import extra_array, token_array
from tests.engine_adapter.torch_engine.kv_world import View

T = 16
WAIT_S = 20.0


class CurrentView(View):
    """The cache as a reader of its events sees it, and whether that is current."""

    def __init__(self):
        super().__init__()
        self.current = asyncio.Event()

    def take(self, event):
        if isinstance(event, ViewCurrent):
            self.current.set()
        elif isinstance(event, ViewLost | CacheCleared):
            View.__init__(self)
            if isinstance(event, ViewLost):
                self.current.clear()
        else:
            self.apply([event])

    @property
    def salts(self):
        return {salt for known in self.tiers.values() for _, salt, *_ in known.values()}


@pytest.fixture
async def adapter(adapter_of, embedded_engine):
    return adapter_of("embedded", embedded_engine.url)


@pytest.fixture
async def control(adapter):
    client = ControlClient(adapter.spec)
    yield client
    await client.aclose()


async def complete(control, tokens, **fields):
    request = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0} | fields
    return await control.call("POST", "/v1/completions", json=request)


async def fill_the_pool(control, name) -> None:
    """Runs more prompts than fit in 256 blocks, so that every evictable block is evicted."""
    for prompt in range(9):
        await complete(control, [(prompt + i) % 900 + 5 for i in range(480)], cache_salt=f"{name}{prompt}")


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def result(adapter, verb, target):
    return [progress async for progress in adapter.operate(verb, target)]


async def follow(adapter, view) -> None:
    async with aclosing(adapter.events()) as events:
        async for event in events:
            view.take(event)


async def same_as_the_engine(control, view) -> None:
    """Waits until the view equals the engine's own snapshot."""
    for _ in range(int(WAIT_S / 0.05)):
        snapshot = View()
        snapshot.apply(decode_snapshot(await control.fetch("GET", "/kv/snapshot")).events)
        if view.current.is_set() and view.tiers == snapshot.tiers:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the view differs from the snapshot")


async def test_connect_tells_everything(adapter):
    info = await adapter.connect()
    assert info.capabilities == frozenset(Capability) - {Capability.RENDER}
    assert (info.tokens_per_block, info.gpu_blocks) == (T, 256)
    assert all((info.host_blocks, info.vocab_size, info.hidden_size, info.tokenizer, info.version))


async def test_events_and_the_snapshot_give_the_same_view(adapter, control):
    await complete(control, range(10, 60), cache_salt="before")
    view = CurrentView()
    following = asyncio.create_task(follow(adapter, view))
    try:
        await same_as_the_engine(control, view)
        await complete(control, range(10, 90), cache_salt="after", max_tokens=20, ignore_eos=True)
        await same_as_the_engine(control, view)
        salted = KvTarget(cache_salt="after")
        assert "after" in view.salts
        await result(adapter, KvVerb.OFFLOAD, salted)
        await same_as_the_engine(control, view)
        assert view.tiers[Tier.HOST]
        await result(adapter, KvVerb.FLUSH, salted)
        await same_as_the_engine(control, view)
        assert "after" not in view.salts
        await fill_the_pool(control, "events")
        await same_as_the_engine(control, view)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_pins_hold_and_end(adapter, control):
    tokens, salt = token_array(range(200, 264)), "pins"
    await complete(control, tokens, cache_salt=salt)
    pinned = await adapter.pin(KvTarget(tokens, cache_salt=salt), 60.0)
    assert (pinned.blocks, pinned.ttl_s) == (4, 60.0)
    assert (await adapter.stats())["pinned_blocks"] >= 4
    await fill_the_pool(control, "pins")
    assert cached(await complete(control, tokens, cache_salt=salt)) == 48
    assert await adapter.unpin(pinned.pin_id)
    assert not await adapter.unpin(pinned.pin_id)
    with pytest.raises(EngineRejected):
        await adapter.pin(KvTarget(tokens), -1.0)


async def test_prompt_tables_share_only_their_own_kv(adapter, control):
    info = await adapter.connect()
    fake = [info.vocab_size + row for row in range(T)]
    for extra_id, table_id in enumerate(("soft/1", "soft 2"), start=1):
        rows = torch.randn(T, info.hidden_size, generator=torch.Generator().manual_seed(extra_id))
        table = PromptTable(table_id, extra_id, T, info.hidden_size, save({"t": rows}))
        await adapter.put_prompt_table(table)
        await adapter.put_prompt_table(table)
    prompt = [*fake, *range(1, 6)]
    first = await complete(control, prompt, prompt_table="soft/1", logprobs=2)
    other = await complete(control, prompt, prompt_table="soft 2", logprobs=2)
    text = [*fake, *range(5, 10)]
    third = await complete(control, text, extra_ids=[1] * T + [0] * 5)
    assert (cached(first), cached(other), cached(third)) == (0, 0, T)
    assert first["choices"][0]["logprobs"] != other["choices"][0]["logprobs"]
    pinned = await adapter.pin(KvTarget(token_array(fake), extra_array([1] * T)), 5.0)
    assert pinned.blocks == 1
    await adapter.unpin(pinned.pin_id)
    with pytest.raises(EngineRejected) as caught:
        await adapter.put_prompt_table(
            PromptTable("soft/1", 9, T, info.hidden_size, save({"t": torch.zeros(T, info.hidden_size)}))
        )
    assert caught.value.status == 409
    for table_id in ("soft/1", "soft 2", "soft 2"):
        await adapter.delete_prompt_table(table_id)
    with pytest.raises(EngineRejected) as caught:
        await complete(control, prompt, prompt_table="soft/1")
    assert caught.value.param == "prompt_table"


async def test_an_engine_without_host_tier_or_pins_that_is_killed(adapter_of, start_engine):
    engine = start_engine("--kv-blocks", "64", "--pin-share", "0")
    adapter = adapter_of("embedded", engine.url)
    info = await adapter.connect()
    assert info.host_blocks == 0
    missing = {Capability.RENDER, Capability.OFFLOAD, Capability.RESTORE}
    assert info.capabilities == frozenset(Capability) - missing
    with pytest.raises(NotSupported, match="host"):
        await result(adapter, KvVerb.OFFLOAD, KvTarget())
    async with aclosing(ControlClient(adapter.spec)) as control:
        await complete(control, range(5, 30))
    with pytest.raises(EngineRejected, match="at most 0 of 64") as refused:
        await adapter.pin(KvTarget(token_array(range(5, 30))), 9.0)
    assert refused.value.status == 409
    view = CurrentView()
    following = asyncio.create_task(follow(adapter, view))
    await asyncio.wait_for(view.current.wait(), WAIT_S)
    engine.kill()
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(following, WAIT_S)
    for call in (adapter.connect, adapter.load, adapter.stats):
        with pytest.raises(EngineUnavailable):
            await call()
