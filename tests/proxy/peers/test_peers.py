"""Several proxies in front of the same engines. The engines send no events: proxies know of each other only
by the exchange."""

import asyncio

import msgspec
from structlog.testing import capture_logs

from proxy.core.peers.messages import Batch, Heartbeat, Left, State, frame_of
from proxy.peers import peers as peers_module
from tests.fakes import client_of
from tests.proxy.peers.world import Wire, ask, in_step, placer, until, world


async def test_each_knows_where_the_other_serves_its_peers(unix):
    async with world(unix) as (_engines, (one, two)):
        assert one.peers.sockets() == [str(two.peers.http_socket)]


async def test_only_paths_that_the_exchange_reaches_are_believed(wires):
    async with world(lambda _owner: Wire(wires)) as (_engines, (one, two)):
        one.peers._bus.reaches = lambda socket: socket == "/run/two.http"
        for number, path in enumerate(("/etc/socket", "/run/two.http", None)):
            other = frame_of(two.peers._owner, Batch(10**6 + number, [State("x", [], path)]))
            one.peers._receive(other)
            assert one.peers.sockets() == ["/run/two.http"] * (number == 1)


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


async def test_one_that_stops_is_gone_at_once(unix):
    async with world(unix) as (_, (one, two)):
        await one.peers.aclose()
        await until(lambda: not two.peers.stats().peers)
        assert two.peers.stats().lost == 0


async def test_one_of_another_version_is_ignored(wires):
    async with world(lambda _: Wire(wires)) as (_, (one, _two)):
        wires[0].ears.receive(b"\x63" + frame_of(7, Batch(1, [Heartbeat(0, 0)]))[1:])
        wires[0].ears.receive(frame_of(7, Batch(1, []))[:10])
        assert in_step(one)


async def test_a_frame_with_broken_hashes_is_ignored(wires):
    async with world(lambda _: Wire(wires)) as (_, (one, _two)):
        told = msgspec.msgpack.encode([1, [[9, one.peers._owner, "a", b"123"]]])
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
