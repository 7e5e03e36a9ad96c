"""The poller over answers a test writes: what is asked when, and what becomes of a view."""

import asyncio
import json
from array import array
from contextlib import aclosing, asynccontextmanager

import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.tensorrt_llm import poller as module
from engine_adapter.tensorrt_llm.events import PolledEventReader
from engine_adapter.tensorrt_llm.poller import (
    NO_LORA_IN_EVENTS,
    NO_SALT_IN_EVENTS,
    SEVERAL_RANKS,
    SILENT,
    SILENT_PROMPTS,
    EventPoller,
    Traffic,
)
from engine_adapter.types import CacheCleared, ViewCurrent, ViewLost
from tests.engine_adapter.tensorrt_llm.test_events import ONE, TWO, answer, created, stored

SIZE = 4
WAIT_S = 5


class Server:
    """Gives each answer once, `[]` else; `asked` counts."""

    def __init__(self):
        self.answers: list[bytes | Exception] = []
        self.asked = 0
        self.was_asked = asyncio.Event()

    async def drain(self) -> bytes:
        self.asked += 1
        self.was_asked.set()
        await asyncio.sleep(0)
        given = self.answers.pop(0) if self.answers else b"[]"
        if isinstance(given, Exception):
            raise given
        return given

    async def asks(self, times: int) -> None:
        target = self.asked + times
        async with asyncio.timeout(WAIT_S):
            while self.asked < target:
                self.was_asked.clear()
                await self.was_asked.wait()


@pytest.fixture
def server():
    return Server()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "BUSY_S", 0.001)
    monkeypatch.setattr(module, "IDLE_S", 0.002)


@pytest.fixture
def poller(server):
    return EventPoller(server.drain, lambda: PolledEventReader(SIZE, exact=True))


@asynccontextmanager
async def following(poller):
    async with aclosing(poller.events()) as events:

        async def following():
            async with asyncio.timeout(WAIT_S):
                return await anext(events)

        yield following


def served(poller, count):
    for number in range(count):
        poller.traffic.served(array("i", range(number, number + 10)), SIZE)


async def test_a_request_that_ends_is_asked_about_at_once(server, poller, monkeypatch):
    monkeypatch.setattr(module, "BUSY_S", 3600)
    monkeypatch.setattr(module, "IDLE_S", 3600)
    async with following(poller) as event:
        await event()
        await event()
        server.answers = [answer(stored(ONE), first=3)]
        waiting = asyncio.create_task(event())
        await asyncio.sleep(0)
        poller.wake()
        assert (await waiting).hashes == (1,)


async def test_waits_grow_while_nothing_happens_and_shrink_with_traffic(server, poller, monkeypatch):
    monkeypatch.setattr(module, "BUSY_S", 1.0)
    monkeypatch.setattr(module, "IDLE_S", 5.0)
    waits = []

    async def pause(seconds):
        waits.append(seconds)
        if len(waits) == 5:
            poller.traffic.in_flight = 1
        if len(waits) == 6:
            poller.traffic.in_flight = 0
        if len(waits) == 8:
            raise EngineUnavailable("enough")
        await asyncio.sleep(0)

    monkeypatch.setattr(poller, "_pause", pause)
    with pytest.raises(EngineUnavailable, match="enough"):
        async for _ in poller.events():
            pass
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0, 1.0, 2.0, 4.0]


class TestReset:
    async def test_nothing_of_before_is_told_after_it(self, server, poller, monkeypatch):
        monkeypatch.setattr(module, "IDLE_S", 0.001)
        server.answers = [answer(created(), stored(ONE))]
        async with following(poller) as event:
            for _ in range(3):
                await event()
            done = []

            async def act():
                done.append(server.asked)
                server.answers = [answer(stored(TWO), first=2), b"[]", answer(stored(ONE), first=3)]

            await poller.reset(act)
            assert done
            assert [await event(), await event()] == [CacheCleared(), ViewCurrent()]
            assert (await event()).hashes == (1,)
        assert poller.reader.gaps == 0

    async def test_a_request_that_runs_meanwhile_may_leave_what_is_not_known(self, poller):
        poller.traffic.in_flight = 1

        async def act():
            pass

        async with following(poller) as event:
            await event()
            await poller.reset(act)
            assert [await event() for _ in range(3)] == [
                CacheCleared(),
                ViewCurrent(complete=False),
                ViewCurrent(complete=False),
            ]

    async def test_one_that_is_refused_changes_nothing(self, server, poller):
        server.answers = [answer(created())]

        async def act():
            raise EngineUnavailable("no")

        async with following(poller) as event:
            assert [await event(), await event()] == [ViewLost("connected"), ViewCurrent()]
            with pytest.raises(EngineUnavailable, match="no"):
                await poller.reset(act)
            server.answers = [answer(stored(ONE), first=1)]
            assert (await event()).hashes == (1,)


BEGUN = {"event_id": 0, "data": created(), "window_size": 64}
OF_TWO_RANKS = json.dumps([BEGUN | {"attention_dp_rank": rank} for rank in (0, 1)]).encode()
SALTLESS = {name: value for name, value in ONE.items() if name != "cache_salt"}


class TestDoubt:
    @pytest.mark.parametrize(
        ("traffic", "events", "doubt"),
        [
            (Traffic(lora=True), answer(created(), stored(ONE)), NO_LORA_IN_EVENTS),
            (Traffic(salted=True), answer(created(), stored(SALTLESS)), NO_SALT_IN_EVENTS),
            (Traffic(), OF_TWO_RANKS, SEVERAL_RANKS),
        ],
    )
    async def test_events_that_do_not_tell_what_was_asked_void_the_view(
        self, server, poller, traffic, events, doubt
    ):
        poller.traffic = traffic
        server.answers = [events]
        async with following(poller) as event:
            got = []
            while not got or not isinstance(got[-1], ViewCurrent):
                got.append(await event())
            assert await event() == ViewLost(doubt.problem)
            assert poller.doubt is doubt
            asked = server.asked
            waiting = asyncio.create_task(event())
            for _ in range(50):
                poller.wake()
                await asyncio.sleep(0)
            assert (waiting.done(), server.asked) == (False, asked)  # for good
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def test_silence_is_doubted_until_it_ends(self, server, poller):
        async with following(poller) as event:
            await event()
            await event()
            served(poller, SILENT_PROMPTS - 1)
            poller.traffic.served(array("i", range(10)), SIZE)  # one it had
            poller.traffic.served(array("i", [1, 2]), SIZE)  # fills no block
            poller.traffic.served(None, SIZE)
            waiting = asyncio.create_task(event())
            await server.asks(3)
            assert poller.doubt is None
            served(poller, SILENT_PROMPTS + 5)
            assert await waiting == ViewLost(SILENT.problem)
            assert len(poller.traffic.prompts) == SILENT_PROMPTS
            waiting = asyncio.create_task(event())
            await server.asks(3)
            assert poller.doubt is SILENT
            server.answers = [answer(created(), stored(ONE))]
            assert (await waiting).hashes == (1,)
            assert await event() == ViewCurrent()
            server.answers = [answer(stored(TWO), first=2)]
            assert (await event()).hashes == (2,)
            assert poller.doubt is None
