"""What a newcomer knows before it says that it is ready, and what one that was lost is told."""

import asyncio

from proxy.core.placement.load import Sample, Work
from proxy.peers import joining
from proxy.peers import peers as peers_module
from tests.fakes import client_of, proxy_over
from tests.kv_world import tokens
from tests.proxy.peers.world import Gated, Wire, ask, placer, until, world


async def test_a_newcomer_knows_all_before_it_is_ready(unix):
    async with world(unix) as (engines, (one, two)), client_of(one) as client:
        for number in range(5):
            await ask(client, tokens(400, number), session_id=f"chat {number}")
        placer(one).books["b"].rates.learn(Sample(Work(1024), 4.0, 0.0))
        engines[0].gate.clear(), engines[1].gate.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ask(client, stream=True))
            await until(lambda: any(e.ledger.in_flight for e in one.fleet.engines.values()))
            async with proxy_over(*engines, reuse=True, exchange=unix) as three, client_of(three) as own:
                assert (await own.get("/health/ready")).status_code == 503
                await until(lambda: three.peers.is_ready)
                ready = await own.get("/health/ready")
                assert (ready.status_code, ready.json()["exchange"]) == (200, "ok")
                for name in "ab":
                    assert placer(three).index.held(name, "gpu") == placer(one).index.held(name, "gpu")
                    assert placer(three).index.pending(name) == placer(one).index.pending(name)
                assert dict(placer(three)._sessions) == dict(placer(one)._sessions)
                assert placer(three).rates.prefill_tok_s == placer(one).rates.prefill_tok_s == 256
                assert sum(e.ledger.in_flight for e in three.fleet.engines.values()) == 1
                engines[0].gate.set(), engines[1].gate.set()
                await running
                await three.settled()
        await two.settled()


async def test_one_alone_is_ready_at_once(unix):
    async with Gated("a") as engine, proxy_over(engine, reuse=True, exchange=unix) as proxy:
        await until(lambda: proxy.peers.is_ready, 1.5)


async def test_one_that_nobody_answers_is_ready_after_a_while(wires, monkeypatch):
    monkeypatch.setattr(joining, "JOIN_S", 0.2)
    async with (
        Gated("a") as engine,
        proxy_over(engine, reuse=True, exchange=lambda _: Wire(wires)) as proxy,
    ):
        await until(lambda: proxy.peers.is_ready)


async def test_what_one_learned_during_a_partition_is_told_after_it(wires, monkeypatch):
    monkeypatch.setattr(peers_module, "LOST_S", 0.3)
    monkeypatch.setattr(peers_module, "HEARTBEAT_S", 0.05)
    async with world(lambda _: Wire(wires)) as (_, (one, two)), client_of(one) as client:
        wires[0].is_cut = True
        await until(lambda: not one.peers.stats().peers and not two.peers.stats().peers)
        home = (await ask(client)).headers["x-kvpin-engine"]
        assert placer(two).index.held(home, "gpu") == 0
        wires[0].is_cut = False
        await until(lambda: placer(two).index.held(home, "gpu") == 20)
