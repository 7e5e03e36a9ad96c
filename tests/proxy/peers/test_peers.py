"""Several proxies in front of the same engines, over real sockets. The engines send no events: proxies know
of each other only by the exchange."""

import asyncio
import contextlib
import json
from time import monotonic

import msgspec
import pytest
from structlog.testing import capture_logs

from proxy.core.peers import round_trip
from proxy.core.peers.matching import match
from proxy.core.peers.messages import Batch, Heartbeat, Left, State, ToldEngine, frame_of
from proxy.core.placement.load import Sample, Work
from proxy.core.quotas import TenantLimits
from proxy.peers import peers as peers_module
from proxy.peers.peers import address_of
from proxy.peers.unix_sockets import UnixExchange
from proxy.request.tenants import ApiKey, Tenants
from proxy.settings import EngineSettings
from tests.fakes import client_of, proxy_over
from tests.kv_world import tokens
from tests.proxy.peers.world import COMPLETIONS, Gated, Wire, ask, in_step, placer, until, world


@pytest.fixture
def wires():
    return []


@pytest.fixture
def unix(tmp_path):
    directory = tmp_path / "bus"
    return lambda owner: UnixExchange(directory, owner)


async def test_what_one_served_the_other_predicts(unix):
    async with world(unix) as (_, (one, two)), client_of(one) as first, client_of(two) as second:
        answer = await ask(first, session_id="chat")  # no stream: nobody learns that prefill is free
        home = answer.headers["x-kvpin-engine"]
        assert answer.headers["x-kvpin-predicted-tokens"] == "0"
        await until(lambda: placer(two).index.held(home, "gpu") == 20)
        answer = await ask(second, stream=True)
        assert answer.headers["x-kvpin-engine"] == home
        assert answer.headers["x-kvpin-predicted-tokens"] == "320"
        assert len(placer(two)._sessions) == len(placer(one)._sessions) == 1
        await one.settled()
        await two.settled()
        for proxy in (one, two):
            assert sum(engine.ledger.served for engine in proxy.fleet.engines.values()) == 2
            assert sum(engine.served for engine in proxy.fleet.engines.values()) == 1


async def test_each_knows_where_the_other_serves_its_peers(unix):
    async with world(unix) as (_engines, (one, two)):
        (neighbour,) = one.peers.neighbours()
        assert (neighbour.owner, neighbour.socket) == (two.peers.owner, str(two.peers.http_socket))


async def test_where_peers_cannot_be_reached_no_path_is_believed(wires):
    async with world(lambda _owner: Wire(wires)) as (_engines, (one, two)):
        other = frame_of(two.peers.owner, Batch(10**6, [State("x", [], "/etc/socket")]))
        one.peers._receive(other)
        assert one.peers.neighbours() == []


async def test_a_request_counts_at_the_other_while_it_runs(unix):
    async with world(unix) as (engines, (one, two)), client_of(one) as client:
        for engine in engines:
            engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ask(client, stream=True))
            await until(lambda: sum(e.ledger.in_flight for e in two.fleet.engines.values()))
            busy = next(e for e in two.fleet.engines.values() if e.ledger.in_flight)
            assert busy.ledger.view(monotonic()).queue_s > 0
            assert placer(two).index.pending(busy.id) == 20
            assert two.peers.stats().peers[0].in_flight == 1
            for engine in engines:
                engine.gate.set()
            await running
        await two.settled()


LONG = tokens(16 * 2000 + 5)  # computed so slowly, by the prior, that waiting for it pays


async def both_ask(group, one, two, first, second):
    """A request at one proxy, and when the other one knows of it, the same there."""
    running = group.create_task(ask(first, LONG, stream=True))
    await until(lambda: any(e.of_peers for e in two.fleet.engines.values()))
    waiting = group.create_task(ask(second, LONG, stream=True))
    await until(
        lambda: all(sum(e.ledger.in_flight for e in p.fleet.engines.values()) == 2 for p in (one, two))
    )
    return running, waiting


async def test_a_request_waits_for_that_of_a_peer_which_computes_its_prefix(unix):
    async with world(unix) as (engines, (one, two)), client_of(one) as first, client_of(two) as second:
        for engine in engines:
            engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            running, waiting = await both_ask(group, one, two, first, second)
            await asyncio.sleep(0.1)
            assert sum(len(engine.seen) for engine in engines) == 1
            for engine in engines:
                engine.gate.set()
        home = (await running).headers["x-kvpin-engine"]
        answer = await waiting
        assert answer.headers["x-kvpin-engine"] == home
        assert answer.headers["x-kvpin-predicted-tokens"] == "32000"
        await one.settled()
        await two.settled()
        assert not any(e.of_peers for proxy in (one, two) for e in proxy.fleet.engines.values())


async def test_where_the_request_of_the_peer_fails_it_computes_the_prefix_itself(unix):
    async with world(unix) as (engines, (one, two)), client_of(one) as first, client_of(two) as second:
        for engine in engines:
            engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            running, waiting = await both_ask(group, one, two, first, second)
            running.cancel()
            await until(lambda: sum(len(engine.seen) for engine in engines) == 2)
            for engine in engines:
                engine.gate.set()
        assert (await waiting).headers["x-kvpin-predicted-tokens"] == "0"
        await one.settled()
        await two.settled()


async def test_of_two_bursts_at_two_proxies_each_engine_gets_half(unix):
    async with world(unix) as (engines, proxies), contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(proxy)) for proxy in proxies]
        for engine in engines:
            engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(ask(clients[number % 2], tokens(400, 37 * number), stream=True))
                placed = number + 1
                await until(
                    lambda placed=placed: all(
                        sum(e.ledger.in_flight for e in proxy.fleet.engines.values()) == placed
                        for proxy in proxies
                    )
                )
            assert [len(engine.seen) for engine in engines] == [4, 4]
            for engine in engines:
                engine.gate.set()


async def test_a_silent_one_is_lost_and_comes_back(wires, monkeypatch):
    monkeypatch.setattr(peers_module, "LOST_S", 0.3)
    monkeypatch.setattr(peers_module, "HEARTBEAT_S", 0.05)
    async with world(lambda _: Wire(wires)) as (engines, (one, two)), client_of(one) as client:
        for engine in engines:
            engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ask(client, stream=True))
            await until(lambda: any(e.ledger.in_flight for e in two.fleet.engines.values()))
            wires[0].is_cut = True
            await until(lambda: not two.peers.stats().peers)
            assert not any(e.ledger.in_flight for e in two.fleet.engines.values())
            assert not any(placer(two).index.pending(name) for name in "ab")
            assert two.peers.stats().lost == 1
            wires[0].is_cut = False
            await until(lambda: in_step(one) and in_step(two))
            assert any(e.ledger.in_flight for e in two.fleet.engines.values())
            for engine in engines:
                engine.gate.set()
            await running
        await two.settled()


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


async def test_one_that_stops_is_gone_at_once(unix):
    async with world(unix) as (_, (one, two)):
        await one.peers.aclose()
        await until(lambda: not two.peers.stats().peers)
        assert two.peers.stats().lost == 0


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
    monkeypatch.setattr(peers_module, "JOIN_S", 0.2)
    async with (
        Gated("a") as engine,
        proxy_over(engine, reuse=True, exchange=lambda _: Wire(wires)) as proxy,
    ):
        await until(lambda: proxy.peers.is_ready)


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


@pytest.mark.parametrize("url", ["http://gpu7:8000", "http://127.0.0.1:8000"])
def test_ranks_of_one_server_are_engines_of_their_own(url):
    specs = [EngineSettings(kind="vllm", id="v", url=url).of_rank(rank).spec() for rank in (0, 1)]
    told = [ToldEngine(spec.id, *address_of(spec), "m", 16) for spec in specs]
    assert [match(each, told) for each in told] == told


async def test_one_of_another_version_is_ignored(wires):
    async with world(lambda _: Wire(wires)) as (_, (one, _two)):
        wires[0].ears.receive(b"\x63" + frame_of(7, Batch(1, [Heartbeat(0, 0)]))[1:])
        wires[0].ears.receive(frame_of(7, Batch(1, []))[:10])
        assert in_step(one)


async def test_a_frame_with_broken_hashes_is_ignored(wires):
    async with world(lambda _: Wire(wires)) as (_, (one, _two)):
        told = msgspec.msgpack.encode([1, [[9, one.peers.owner, "a", b"123"]]])
        wires[0].ears.receive(frame_of(7, Batch(1, []))[:9] + told)
        assert in_step(one)


async def test_one_may_say_twice_that_it_stops_and_has_a_name_though_it_told_none(wires):
    async with world(lambda _: Wire(wires)) as (_, (one, _two)):
        with capture_logs() as logs:
            wires[0].ears.receive(frame_of(7, Batch(1, [Left(), State("x", []), Left()])))
        assert in_step(one)
        assert [(entry["event"], entry["peer"]) for entry in logs] == [
            ("another kvpin has stopped", "0000000000000007")
        ]


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
