"""The faults between kvpin and engines."""

import asyncio
import random
from contextlib import asynccontextmanager

import httpx
import zmq

from tests.engine_adapter.http.raw_engine import raw_engine

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def serve(wire):
    """An engine that answers every request alike."""
    while await wire.head():
        await wire.write(ANSWER)


@asynccontextmanager
async def relayed(script):
    async with raw_engine(serve) as (url, _):
        relay = script.Relay(int(url.rpartition(":")[2].strip("/")), random.Random(1))  # noqa: S311 - not for secrets
        await relay.start()
        try:
            yield relay
        finally:
            await relay.stop()


async def fates(relay, count, within=60):
    """What becomes of that many requests, which wait `within` seconds for a part of their answer."""
    found = set()
    async with httpx.AsyncClient(base_url=relay.url, timeout=within) as client:
        for _ in range(count):
            try:
                answer = await client.post("/v1/chat/completions", headers={"content-length": "0"})
                found.add((answer.status_code, answer.content))
            except httpx.TransportError as error:
                found.add(type(error))
    return found


async def test_each_fault_spoils_answers_until_it_is_healed(script, monkeypatch):
    monkeypatch.setattr(script, "HIT_SHARE", 1.0)
    monkeypatch.setattr(script, "SLOW_S", (0.0, 0.01))
    async with relayed(script) as relay:
        good = {(200, b"ok")}
        assert await fates(relay, 2) == good
        # In their order: of other dice, garbage may hit a word that nobody reads.
        for how in (each for each in script.Spoil if each is not script.Spoil.SILENT):
            relay.spoil(how)
            comes = how in (script.Spoil.SLOW, script.Spoil.FAIL)
            seen = await fates(relay, 2, within=60 if comes else 0.2)
            assert (seen == good) is (how is script.Spoil.SLOW)
            assert any(fate[0] == 500 for fate in seen if isinstance(fate, tuple)) is (
                how is script.Spoil.FAIL
            )
            relay.heal()
            assert await fates(relay, 1) == good
        relay.spoil(script.Spoil.SILENT)
        asking = asyncio.create_task(fates(relay, 1))
        assert not (await asyncio.wait({asking}, timeout=0.1))[0]
        relay.heal()
        await asking


async def test_events_are_passed_on_or_lost_doubled_and_swapped(script):
    context = zmq.Context()
    source, sink = context.socket(zmq.PUB), context.socket(zmq.SUB)
    port = source.bind_to_random_port("tcp://127.0.0.1")
    relay = script.EventRelay(f"tcp://127.0.0.1:{port}", random.Random(1))  # noqa: S311 - not for secrets
    relay.start()
    sink.setsockopt(zmq.SUBSCRIBE, b"")
    sink.connect(relay.endpoint)
    try:
        while not sink.poll(0):  # both connections are there
            source.send(b"event")
            await asyncio.sleep(0.01)
        relay.spoils = True
        found = [int(event) for number in range(200) for (event,) in relay._spoiled([b"%d" % number])]
        assert found != sorted(found)
        assert len(found) > len(set(found)) < 200
        relay.spoils = False
        assert relay._spoiled([b"200"])[0] == [b"200"]
        assert relay._spoiled([b"201"]) == [[b"201"]]
    finally:
        relay.stop()
        context.destroy(linger=0)
