"""What goes over the wire, and what those who ask are told."""

import asyncio
import contextlib
import json

import pytest

from engine_adapter import Tier
from proxy.core.audit import Trust
from proxy.core.peers.messages import Contents, ToldEngine, match, unpacked
from proxy.core.placement.load import LoadSample, Work
from proxy.core.placement.rates import Timings
from proxy.core.quotas import TenantLimits
from proxy.fleet.engine import address_of
from proxy.fleet.fleet import Fleet
from proxy.peers import peer as told_module
from proxy.peers import peers as peers_module
from proxy.peers.peer import contents
from proxy.request.tenants import ApiKey, Tenants
from proxy.settings import EngineSettings
from tests.fakes import add_ready, client_of, proxy_over
from tests.proxy.peers.world import Gated, Wire, ask, in_flight, in_step, open_all, shut, until, world


async def test_after_a_lost_frame_they_agree_again(wires):
    async with world(lambda _: Wire(wires)) as (engines, (one, two)), client_of(one) as client:
        shut(engines)
        async with asyncio.TaskGroup() as group:
            wires[0].is_cut = True
            running = group.create_task(ask(client, stream=True))
            await until(lambda: in_flight(one))
            await asyncio.sleep(20 * peers_module.BATCH_S)
            wires[0].is_cut = False
            await until(lambda: in_flight(two))
            await until(lambda: in_step(two))
            assert two.peers.stats().peers[0].missed == 1
            assert b'kvpin_exchange_faults_total{fault="missed"} 1.0' in two.metrics.render()
            open_all(engines)
            await running
        await two.settled()


@contextlib.asynccontextmanager
async def two_that_limit(exchange):
    """An engine, and two proxies that let a tenant have one request at a time, each with a client."""
    limits = {"t": TenantLimits(concurrent_requests=1)}
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Gated("a"))
        options = {"reuse": True, "exchange": exchange}
        one, two = [
            await stack.enter_async_context(
                proxy_over(engine, tenants=Tenants([ApiKey.of("key", "t")], limits), **options)
            )
            for _ in range(2)
        ]
        await until(lambda: in_step(one) and in_step(two))
        headers = {"authorization": "Bearer key"}
        first = await stack.enter_async_context(client_of(one, headers=headers))
        second = await stack.enter_async_context(client_of(two, headers=headers))
        yield engine, (one, two), (first, second)


async def test_the_limits_of_a_tenant_hold_for_all_together(unix):
    async with two_that_limit(unix) as (engine, (_, two), (first, second)):
        engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ask(first, stream=True))
            await until(lambda: in_flight(two))
            refused = await ask(second)
            assert refused.status_code == 429
            assert "concurrent_requests" in refused.text
            engine.gate.set()
            await running
        await two.settled()
        assert (await ask(second)).status_code == 200


@pytest.mark.parametrize("cut", [0, 1], ids=["there", "here"])
async def test_a_request_that_ended_while_the_exchange_was_away_counts_no_more(wires, cut):
    async with two_that_limit(lambda _: Wire(wires)) as (engine, (one, two), (first, second)):
        engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ask(first))
            await until(lambda: in_flight(two))
            wires[cut].is_cut, one.peers.bus.is_private, two.peers.bus.is_private = True, False, False
            engine.gate.set()
            await running
        await one.settled()
        await asyncio.sleep(20 * peers_module.BATCH_S)
        assert (await ask(second)).status_code == 429
        wires[cut].is_cut = False
        wires[cut].ears.joined()
        await until(lambda: two.tenants.quota("t").has_room, 2)


async def test_nothing_of_a_prompt_or_a_name_goes_over_the_wire(wires):
    async with world(lambda _: Wire(wires)) as (_, (one, _two)), client_of(one) as client:
        frames = []
        wires[0].publish = frames.append
        await ask(client, [5] * 64, prompt_cache_key="my secret chat")
        await until(lambda: len(b"".join(frames)) > 200)
        told = b"".join(frames)
        assert b"secret" not in told
        assert json.dumps([5] * 10).encode() not in told


def test_what_is_learned_and_where_conversations_were_is_told_in_parts(monkeypatch):
    monkeypatch.setattr(told_module, "PART", 3)
    fleet = Fleet()
    learned, precise = add_ready(fleet, "a"), add_ready(fleet, "b")
    learned.audit.lost("no events")
    precise.audit.synced()
    assert (learned.audit.trust, precise.audit.trust) == (Trust.APPROXIMATE, Trust.PRECISE)
    pool = fleet.pools["m"]
    for chain in ((1, 2), (3, 4), (5,)):
        pool.learn(learned, chain)
    for session in (10, 11, 12, 13):
        pool.placer._note(session, "a")
    pool.placer._note("a name", "a")
    pool.placer.books["a"].rates.learn(LoadSample(Work(512), 0.5, 0.0))
    timed, first, second, _, *sessions, last = contents(fleet, 9)
    assert timed.timings == Timings([(512, 0.5)], are_blurred=False, answers=[])
    assert [unpacked(each) for each in first.stretches] == [(5,), (3, 4)]
    assert [unpacked(each) for each in second.stretches] == [(1, 2)]
    assert [unpacked(each.sessions) for each in sessions] == [(13, 12, 11), (10,)]
    assert last == Contents(9)


def test_an_engine_that_leaves_while_contents_are_told_is_left_out():
    fleet = Fleet()
    engines = [add_ready(fleet, name) for name in "abc"]
    telling = contents(fleet, 9)
    told = [next(telling)]
    fleet.leave(engines[1])
    assert [each.engine for each in (*told, *telling)] == ["a", "c", None]


def test_what_is_adopted_is_older_than_all_that_is_known():
    fleet = Fleet()
    engine = add_ready(fleet, "a", gpu_blocks=4)
    engine.audit.lost("no events")
    pool = fleet.pools["m"]
    pool.learn(engine, (1, 2))
    pool.adopt(engine, (1, 2, 3))
    pool.adopt(engine, (8, 9))
    assert pool.index.held("a", Tier.GPU) == 4  # there is room for one block of the last
    pool.learn(engine, (20,))
    assert not pool.index.holds("a", 8)
    assert all(pool.index.holds("a", block) for block in (1, 2, 3, 20))
    engine.audit.synced()
    pool.adopt(engine, (30,))
    assert not pool.index.holds("a", 30)


@pytest.mark.parametrize("url", ["http://gpu7:8000", "http://127.0.0.1:8000"])
def test_ranks_of_one_server_are_engines_of_their_own(url):
    specs = [EngineSettings(kind="vllm", id="v", url=url).of_part(rank).spec() for rank in (0, 1)]
    told = [ToldEngine(spec.id, *address_of(spec), "m", 16) for spec in specs]
    assert [match(each, told) for each in told] == told
