"""Which engines of another kvpin are engines here, and what its requests do to those."""

import asyncio

from tests.fakes import client_of
from tests.kv_world import tokens
from tests.proxy.peers.world import ask, in_flight, open_all, placer, shut, until, world


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
            engines = proxy.fleet.engines.values()
            await until(lambda engines=engines: sum(engine.ledger.placed for engine in engines) == 2)
            assert sum(engine.served for engine in engines) == 1


LONG = tokens(16 * 2000 + 5)  # computed so slowly, by the prior, that waiting for it pays


async def both_ask(group, one, two, first, second):
    """A request at one proxy, and when the other one knows of it, the same there."""
    running = group.create_task(ask(first, LONG, stream=True))
    await until(lambda: in_flight(two) == 1)
    waiting = group.create_task(ask(second, LONG, stream=True))
    await until(lambda: in_flight(one) == in_flight(two) == 2)
    return running, waiting


async def test_a_request_waits_for_that_of_a_peer_which_computes_its_prefix(unix):
    async with world(unix) as (engines, (one, two)), client_of(one) as first, client_of(two) as second:
        shut(engines)
        async with asyncio.TaskGroup() as group:
            running, waiting = await both_ask(group, one, two, first, second)
            await asyncio.sleep(0.1)
            assert sum(len(engine.seen) for engine in engines) == 1
            open_all(engines)
        home = (await running).headers["x-kvpin-engine"]
        answer = await waiting
        assert answer.headers["x-kvpin-engine"] == home
        assert answer.headers["x-kvpin-predicted-tokens"] == "32000"
        await one.settled()
        await two.settled()
        assert not any(e.of_peers for proxy in (one, two) for e in proxy.fleet.engines.values())


async def test_where_the_request_of_the_peer_fails_it_computes_the_prefix_itself(unix):
    async with world(unix) as (engines, (one, two)), client_of(one) as first, client_of(two) as second:
        shut(engines)
        async with asyncio.TaskGroup() as group:
            running, waiting = await both_ask(group, one, two, first, second)
            running.cancel()
            await until(lambda: sum(len(engine.seen) for engine in engines) == 2)
            open_all(engines)
        assert (await waiting).headers["x-kvpin-predicted-tokens"] == "0"
        await one.settled()
        await two.settled()
