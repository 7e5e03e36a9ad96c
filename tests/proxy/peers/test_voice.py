"""What goes over the wire, and what those who ask are told."""

import asyncio
import contextlib
import json

from proxy.core.quotas import TenantLimits
from proxy.peers import peers as peers_module
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import client_of, proxy_over
from tests.proxy.peers.world import COMPLETIONS, Gated, Wire, ask, in_step, until, world


async def test_after_a_gap_they_agree_again(wires, monkeypatch):
    monkeypatch.setattr(peers_module, "HEARTBEAT_S", 0.05)
    async with world(lambda _: Wire(wires)) as (engines, (one, two)), client_of(one) as client:
        for engine in engines:
            engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            wires[0].is_cut = True
            running = group.create_task(ask(client, stream=True))
            await until(lambda: any(e.ledger.in_flight for e in one.fleet.engines.values()))
            await until(lambda: wires[0].dropped)
            wires[0].is_cut = False
            await until(lambda: any(e.ledger.in_flight for e in two.fleet.engines.values()))
            await until(lambda: in_step(two))
            assert two.peers.stats().peers[0].gaps == 1
            assert b'kvpin_exchange_faults_total{fault="gap"} 1.0' in two.metrics.render()
            for engine in engines:
                engine.gate.set()
            await running
        await two.settled()


async def test_the_limits_of_a_tenant_hold_for_all_together(unix):
    limits = {"t": TenantLimits(concurrent_requests=1, requests_per_minute=3)}

    def tenants():
        return Tenants([ApiKey.of("key", "t")], limits)

    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Gated("a"))
        one, two = [
            await stack.enter_async_context(proxy_over(engine, reuse=True, exchange=unix, tenants=tenants()))
            for _ in range(2)
        ]
        await until(lambda: in_step(one) and in_step(two))
        headers = {"authorization": "Bearer key"}
        first = await stack.enter_async_context(client_of(one, headers=headers))
        second = await stack.enter_async_context(client_of(two, headers=headers))
        engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ask(first, stream=True))
            await until(lambda: any(e.ledger.in_flight for e in two.fleet.engines.values()))
            refused = await ask(second)
            assert refused.status_code == 429
            assert "concurrent_requests" in refused.text
            engine.gate.set()
            await running
        await two.settled()
        statuses = []
        for client in (first, second, first):
            statuses.append((await ask(client)).status_code)
            await one.settled()
            await two.settled()
            await asyncio.sleep(0.05)
        assert statuses == [200, 200, 429]
        assert "requests_per_minute" in (await ask(second)).text


async def test_nothing_of_a_prompt_or_a_name_goes_over_the_wire(wires):
    async with world(lambda _: Wire(wires)) as (_, (one, _two)), client_of(one) as client:
        frames = []
        wires[0].publish = frames.append
        await client.post(
            COMPLETIONS,
            json={"model": "m", "prompt": [5] * 64, "max_tokens": 1, "prompt_cache_key": "my secret chat"},
        )
        await until(lambda: len(b"".join(frames)) > 200)
        assert b"secret" not in b"".join(frames)
        assert json.dumps([5] * 10).encode() not in b"".join(frames)
