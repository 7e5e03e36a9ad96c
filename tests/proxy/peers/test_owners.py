"""Kvpins that claim an engine which only one may use. With a real llama-server: tests/live/test_owners.py."""

import asyncio
from dataclasses import replace
from unittest.mock import AsyncMock

import pytest
import structlog

from engine_adapter import EngineTaken
from proxy.core.peers import messages
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.monitor import Monitor
from proxy.peers.peers import Peers
from proxy.prompt import RegisteredTables
from proxy.request.tenants import Tenants
from proxy.runtime import Supervisor
from tests.fakes import FakeAdapter
from tests.proxy.peers.world import Wire
from tests.proxy.peers.world import until as until_within

ADDRESS = "http://llama:8080"


async def until(is_true):
    await until_within(is_true, 60)


class Slots(FakeAdapter):
    """An engine that only one kvpin may use; `users` are those that do, and `lock` is whose lock it is."""

    one_owner = True

    def __init__(self, name, users, lock=None):
        super().__init__("slots", ADDRESS)
        self.name, self.users, self.lock = name, users, lock
        self.has_lock = lock is not None

    async def connect(self):
        if self.lock is not None and self.lock.setdefault("holder", self.name) != self.name:
            raise EngineTaken("locked", holder=self.lock["holder"])
        self.users.add(self.name)
        assert len(self.users) == 1, self.users
        return await super().connect()

    async def leave(self):
        self.users.discard(self.name)
        if self.lock is not None and self.lock.get("holder") == self.name:
            del self.lock["holder"]


class Kvpin:
    """One of several."""

    def __init__(self, number, wires, users, lock):
        self.number, self.wire = number, Wire(wires)
        self.fleet, self.tasks = Fleet(), Supervisor()
        self.peers = Peers(self.wire, number, self.fleet, Tenants([]))
        self.peers.name = f"kvpin {number}"
        ingest = Ingest(self.fleet, self.tasks)
        monitor = Monitor(self.fleet, self.tasks, ingest, RegisteredTables(), interval_s=0.05, timeout_s=5)
        self.adapter = Slots(number, users, lock)
        self.engine = self.fleet.add(self.adapter)
        monitor.watch(self.engine)
        self.peers.start(self.tasks)

    @property
    def is_owner(self):
        return self.engine.state is EngineState.READY

    def sees_at(self, owner):
        return (self.engine.state, self.engine.owner) == (EngineState.ELSEWHERE, f"kvpin {owner}")

    async def die(self):
        """Like a crash: nobody hears of it."""
        self.wire.is_cut = True
        await self.tasks.stop()
        await self.adapter.leave()


@pytest.fixture(autouse=True)
def quick(virtual_time, quick):
    """Time is virtual: nothing here waits."""


@pytest.fixture
async def kvpin():
    """Starts kvpins that hear each other; of those that `locks`, all see one lock."""
    wires, users, lock, started = [], set(), {}, []

    def start(number, *, locks=False, is_connected=True):
        kvpin = Kvpin(number, wires, users, lock if locks else None)
        kvpin.wire.is_connected = is_connected
        kvpin.wire.is_cut = not is_connected
        started.append(kvpin)
        return kvpin

    yield start
    for each in started:
        await each.tasks.stop()


async def test_one_that_may_not_own_engines_leaves_it_to_another(kvpin):
    """Of the workers of one kvpin, only the one that speaks for all may."""
    five = kvpin(5)
    five.peers._may_own = lambda: False
    nine = kvpin(9)
    await until(lambda: nine.is_owner and five.sees_at(9))
    await nine.die()
    await until(lambda: five.engine.owner is None)
    five.peers._may_own = lambda: True
    await until(lambda: five.is_owner)


async def test_it_goes_to_another_one_when_its_owner_dies_or_leaves(kvpin):
    five, nine = kvpin(5), kvpin(9)
    await until(lambda: five.is_owner and nine.sees_at(5))
    await five.die()
    await until(lambda: nine.is_owner)
    six = kvpin(6)
    await until(lambda: six.sees_at(9))
    nine.fleet.remove(nine.fleet.engine("slots"))
    await nine.adapter.leave()
    await nine.peers.aclose()
    await until(lambda: six.is_owner)


async def test_of_two_that_did_not_hear_each_other_one_lets_go(kvpin):
    five, nine = kvpin(5), kvpin(9)
    await until(lambda: five.is_owner)
    nine.adapter.users = set()  # that both use it meanwhile is what a lock prevents
    nine.wire.is_cut = True
    await until(lambda: nine.is_owner)
    left = []
    five.adapter.leave = AsyncMock(side_effect=lambda: left.append(True))
    nine.wire.is_cut = False
    await until(lambda: five.sees_at(9))
    await until(lambda: left)
    assert nine.is_owner


def told(name, model, claim):
    return messages.ToldEngine(name, ADDRESS, False, model, 16, claim)


@pytest.mark.parametrize("others", [(), ("more",), ("a", "b")])
async def test_engines_of_one_server_have_one_owner_that_serves_all_their_models(kvpin, others):
    """A router that one kvpin has connected to is as many engines there as it has models."""
    five = kvpin(5)
    for name in others:
        adapter = Slots(5, set())
        adapter.spec = replace(adapter.spec, id=name)
        five.fleet.add(adapter)
    peers = five.peers
    claim = messages.Claim(3, is_held=True)
    theirs = [told("a", "m", claim), told("b", "n", claim), told("c", None, claim)]
    state = messages.KvpinState("nine", theirs)
    with structlog.testing.capture_logs() as logs:
        for _ in range(50):
            peers._receive(messages.frame_of(9, [state, messages.Heartbeat(b"", 0.0)]))
            await asyncio.sleep(0.1)
    assert {each.owner for each in five.fleet.engines.values()} == {"nine"}
    assert {each.models for each in peers.owners.elsewhere.values()} == {frozenset("mn")}
    assert peers.owners.claim_of(five.engine) is None
    assert sum(log["event"] == "another kvpin owns the engine" for log in logs) == len(five.fleet.engines)


async def test_without_contact_a_lock_keeps_the_second_one_off(kvpin):
    five, nine = kvpin(5, locks=True), kvpin(9, locks=True)
    await until(lambda: five.is_owner)
    nine.wire.is_cut = True
    with structlog.testing.capture_logs() as logs:
        await until(lambda: nine.engine.state is EngineState.ELSEWHERE)
        await asyncio.sleep(10)  # it is tried again and again
    assert [log["reason"] for log in logs if log["event"] == "engine is not used"] == ["locked"]
    nine.wire.is_cut = False
    await until(lambda: nine.sees_at(5))
    assert five.is_owner
    await five.die()
    await until(lambda: nine.is_owner)


async def test_without_the_exchange_only_an_engine_with_a_lock_is_used(kvpin):
    alone, locking = kvpin(5, is_connected=False), kvpin(9, is_connected=False, locks=True)
    await until(lambda: locking.is_owner)
    assert alone.engine.state is EngineState.CONNECTING
    assert not alone.engine.mine.is_set()


async def test_one_that_stood_still_is_no_owner_before_it_has_heard_the_others(kvpin):
    five = kvpin(5)
    await until(lambda: five.is_owner)
    with structlog.testing.capture_logs() as logs:
        five.peers.owners.doubt(asyncio.get_running_loop().time())
        await until(lambda: five.engine.state is EngineState.CONNECTING)
        assert five.engine.owner is None
        await until(lambda: any(log["event"] == "this kvpin owns the engine" for log in logs))
    await until(lambda: five.is_owner)


async def test_a_lock_keeps_others_off_one_that_stood_still_and_who_is_locked_out_says_so_at_once(kvpin):
    five = kvpin(5, locks=True)
    await until(lambda: five.is_owner)
    five.peers.owners.doubt(asyncio.get_running_loop().time())
    assert not five.peers.owners.is_bidding
    five.engine.state = EngineState.ELSEWHERE
    assert not five.peers.owners.claim_of(five.engine).is_held
