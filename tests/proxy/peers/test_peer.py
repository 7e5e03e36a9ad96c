"""How far behind another kvpin is, and which of its engines are engines here."""

import asyncio

from proxy.core.peers import round_trip
from proxy.peers import peers as peers_module
from tests.fakes import client_of, proxy_over
from tests.kv_world import tokens
from tests.proxy.peers.world import Gated, Wire, ask, in_step, placer, until, world


async def test_the_load_of_one_that_is_behind_does_not_count_until_it_has_caught_up(wires, monkeypatch):
    monkeypatch.setattr(peers_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(round_trip, "BEHIND_S", 0.3)
    async with world(lambda _: Wire(wires)) as (engines, (one, two)), client_of(one) as client:
        wires[0].delay_s = 0.5
        await until(lambda: two.peers.stats().peers[0].behind and one.peers.stats().peers[0].behind)
        assert two.peers.stats().peers[0].round_trip_s > 0.3
        assert b'kvpin_exchange_faults_total{fault="behind"} 1.0' in two.metrics.render()
        home = (await ask(client)).headers["x-kvpin-engine"]
        await until(lambda: placer(two).index.held(home, "gpu") == 20)
        for engine in engines:
            engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ask(client, tokens(400, 5), stream=True))
            await until(lambda: two.peers.stats().peers[0].in_flight == 1)
            assert not any(e.ledger.in_flight for e in two.fleet.engines.values())
            wires[0].delay_s = 0.0
            await until(lambda: any(e.ledger.in_flight for e in two.fleet.engines.values()))
            for engine in engines:
                engine.gate.set()
            await running
        await two.settled()


async def test_engines_are_matched_by_address(unix):
    async with Gated("a") as engine, Gated("vllm-0") as other:
        engine_there = Gated("vllm-7")
        engine_there.url = engine.url
        async with (
            proxy_over(engine, reuse=True, exchange=unix) as one,
            proxy_over(engine_there, other, reuse=True, exchange=unix) as two,
            client_of(two) as client,
        ):
            await until(lambda: in_step(one) and in_step(two))
            await ask(client)
            await two.settled()
            at = "a" if two.last.placement.engine == "vllm-7" else None
            if at is not None:
                await until(lambda: placer(one).index.held("a", "gpu") == 20)
            assert one.peers.stats().peers[0].engines == 1
