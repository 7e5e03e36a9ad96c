"""Whatever happens to settings, sources, servers and orders, in any order: the fleet becomes what a naive
model of it says. Time is virtual."""

import asyncio
import time
import traceback
from dataclasses import dataclass, field, replace
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_adapter import EngineUnavailable
from proxy.control import reconciler
from proxy.control.operations import Operations
from proxy.control.reconciler import Reconciler
from proxy.core.books import EngineBook
from proxy.errors import Conflict
from proxy.fleet.discovery import FoundEngine
from proxy.fleet.engine import DrainReason, EngineState, order_name
from proxy.fleet.fleet import Fleet
from proxy.fleet.monitor import Monitor
from proxy.prompt import RegisteredTables
from proxy.runtime import Supervisor
from proxy.settings import EngineSettings, StartedSettings, engine_as_json
from tests.fakes import INFO, FakeAdapter
from tests.virtual_time import VirtualClock

GRACE_S, SETTLED_S, CLOSING_S = 5.0, 40.0, 0.3
# The last one has ranks, and the one before it takes one kvpin at a time.
URLS = ("http://gpu0:1", "http://gpu1:1", "http://one:1", "http://ranks:1")
OWN = "http://own:1"  # kvpin's supervisor starts it
IDS, KEYS, MODELS = ("a", "b"), ("k", "l"), ("m", "n")


class Strict(Supervisor):
    """Notes crashes, in place of a log."""

    def __init__(self):
        super().__init__()
        self.crashes = []

    async def _guard(self, name, work):
        try:
            await work
        except Exception:  # noqa: BLE001 - of any kind
            self.crashes.append((name, traceback.format_exc()))


@dataclass
class Server:
    """A server as adapters reach it."""

    is_up: bool = True
    model: str = "m"
    ranks: tuple[int, ...] = ()
    started: int = 0
    users: set = field(default_factory=set)


class Adapter(FakeAdapter):
    """Connects to one of the world's servers."""

    def __init__(self, spec, server):
        super().__init__()
        self.spec, self.server, self.instance, self.is_closed = spec, server, None, False
        self.one_owner = "one" in spec.url

    async def connect(self):
        assert not self.is_closed
        if not self.server.is_up:
            raise EngineUnavailable("nobody listens")
        self.server.users.add(self)
        assert not self.one_owner or self.server.users == {self}
        self.instance = self.server.started
        ranks = self.server.ranks if self.spec.options.rank is None else ()
        return replace(INFO, model=self.server.model, instance=str(self.instance), ranks=ranks)

    async def load(self):
        if not self.server.is_up or self.instance != self.server.started:
            raise EngineUnavailable("another process answers")
        return await super().load()

    async def aclose(self):
        assert not self.is_closed
        self.is_closed = True
        await asyncio.sleep(CLOSING_S)
        self.server.users.discard(self)


class Request:
    """One in flight."""

    is_lost = False

    def on_lost(self):
        pass


class Finder:
    def __init__(self):
        self.said = asyncio.Queue()

    async def found(self):
        while True:
            yield await self.said.get()


@dataclass(frozen=True)
class Claim:
    """Who names a server as what."""

    id: str
    url: str
    key: str
    is_ready: bool = True

    @property
    def is_started(self):
        return self.url == OWN

    def entry(self):
        kind = "vllm" if "ranks" in self.url else "openai_compatible"
        values = {"kind": kind, "url": self.url, "id": self.id, "api_key": self.key}
        if self.is_started:
            return StartedSettings(**values, starting_file=Path("/not/there"))
        return EngineSettings(**values)


class Naive:
    """What the fleet has to be. A place is a server, and its rank if it has several."""

    def __init__(self, servers):
        self.servers = servers
        self.settings, self.found, self.known = [], [], {}
        self.added, self.held, self.removed, self.drained = {}, set(), set(), set()
        self.told = {}  # ranks, by server
        self.used = {}  # place → claim, as used

    def order(self, place, claim):
        self.added.pop(place, None)
        self.added[place] = claim

    def places(self, url):
        return [(url, rank) for rank in self.told.get(url, ())] or [(url, None)]

    def parts(self, claim):
        for place in self.places(claim.url):
            yield place, replace(claim, id=claim.id if place[1] is None else f"{claim.id}-dp{place[1]}")

    def wholes(self):
        """The claims of settings and sources that count."""
        ids, urls, claims = set(), set(), []
        for claim in (*self.settings, *self.found):
            known = claim if claim.is_ready else self.known.get(claim.id)
            url = claim.url if known is None else known.url
            is_new = claim.id not in ids and url not in urls
            if claim.id not in ids:
                urls.add(url)
            if is_new and known is not None:
                ids.add(claim.id)
                claims.append(replace(known, is_ready=claim.is_ready))
        return claims

    def settle(self):
        while True:
            told = dict(self.told)
            self.step()
            for place, claim in self.used.items():
                server = self.servers[place[0]]
                if place not in self.held and server.is_up and "ranks" in claim.url and place[1] is None:
                    self.told[place[0]] = server.ranks if len(server.ranks) > 1 else ()
            if told == self.told:
                return

    def step(self):
        """What has joined by an order stays, and what has an id keeps it; then settings, sources, orders."""
        used = {place: claim for place, claim in self.used.items() if place in self.held}
        by_place = {place: part for claim in self.wholes() for place, part in self.parts(claim)}
        starts = {place for place, part in by_place.items() if part.is_started}
        for place, part in by_place.items():
            ids = {each.id for each in used.values()}
            is_out = place not in starts and (place in self.removed or place in self.held)
            if not is_out and part.id not in ids:
                used[place] = part
        self.known = {
            claim.id: claim
            for claim in self.wholes()
            if any(
                place in used or place in self.removed or place in self.held for place, _ in self.parts(claim)
            )
        }
        for place, ordered in self.added.items():
            before = self.used.get(place)  # one as ordered but for its id stays
            ids = {each.id for each in used.values()}
            stays = before is not None and before.key == ordered.key and before.id not in ids
            if stays and place not in used:
                self.use(used, place, replace(before, is_ready=True))
        for place, ordered in [*self.added.items()][::-1]:  # the last order first
            if place not in used and ordered.id not in {each.id for each in used.values()}:
                self.use(used, place, ordered)
        self.used = used

    def use(self, used, place, claim):
        """An engine joins by an order, unless one is at its address."""
        if not any(place[0] == url and None in (place[1], rank) for url, rank in used):
            used[place] = claim
            self.held.add(place)


class World:
    def __init__(self, *, is_hurried=False):
        self.is_hurried = is_hurried  # things happen before the last ones had their effect
        self.servers = {url: Server() for url in (*URLS, OWN)}
        self.naive = Naive(self.servers)
        self.adapters, self.book, self.requests = [], EngineBook(), []
        self.claims, self.finder, self.other = [], Finder(), EngineBook()
        self.start()

    def start(self):
        self.fleet, self.tasks = Fleet(), Strict()
        self.fleet.book = self.book
        self.book.listeners.clear()
        monitor = Monitor(
            self.fleet, self.tasks, None, RegisteredTables(max_bytes=1), interval_s=2.0, timeout_s=1.0
        )
        self.engines = Reconciler(self.fleet, monitor, Operations(self.tasks), self.tasks, self.make, {})
        monitor.split = self.engines.split
        self.follow()

    def follow(self):
        entries = [claim.entry() for claim in self.claims]
        self.engines.follow(entries, [("source", self.finder)], grace_s=GRACE_S)

    def make(self, spec):
        self.adapters.append(Adapter(spec, self.servers[spec.url]))
        return self.adapters[-1]

    async def stop(self):
        for engine in self.fleet.engines.values():
            self.engines._monitor.forget(engine)
        closing = [each.adapter.aclose() for each in self.fleet.engines.values()]
        await asyncio.gather(self.engines.stop(within_s=GRACE_S), *closing)
        await self.tasks.stop()
        assert all(each.is_closed for each in self.adapters if each.instance is not None)

    # What happens.

    def name_in_settings(self, claims):
        self.claims = self.naive.settings = claims
        self.follow()

    def find(self, claims):
        before, self.naive.found = self.naive.found, claims
        self.finder.said.put_nowait(tuple(FoundEngine(each.entry(), each.is_ready) for each in claims))
        named = {place for each in (*self.claims, *claims) for place in self.naive.places(each.url)}
        self.naive.removed -= {place for each in before for place in self.naive.places(each.url)} - named

    def add(self, claim):
        naive, place = self.naive, (claim.url, None)
        named = {at for each in (*self.claims, *naive.found) for at in naive.places(each.url)}
        is_back = place in naive.removed and place in named
        is_taken = any(url == claim.url for url, _ in naive.used)
        is_taken |= claim.id in {each.id for each in naive.used.values()}
        try:
            self.engines.add(claim.entry())
        except Conflict:
            assert is_back or is_taken or self.is_hurried
        else:
            assert is_back or not is_taken or self.is_hurried
        if is_back or not is_taken:
            naive.removed.discard(place)
        if not is_back and not is_taken:
            naive.order(place, claim)

    def hear(self, claim):
        """An operator adds an engine at another kvpin."""
        place, entry = (claim.url, None), replace(claim, is_ready=True).entry()
        self.naive.removed.discard(place)
        self.naive.order(place, claim)
        if not self.is_hurried and place in self.naive.held and self.ordered(place) != engine_as_json(entry):
            self.naive.held.discard(place)  # with other settings, it joins anew
            self.naive.used.pop(place)
        self.book.add(order_name(entry.spec()), engine_as_json(entry), now=reconciler.time.time())

    def ordered(self, place):
        name = order_name(self.engine_at(place).adapter.spec)
        return next((mark.added for mark in self.book.marks() if mark.engine == name), b"")

    def engine_at(self, place):
        return next(each for each in self.fleet.engines.values() if place_of(each) == place)

    def one(self, number):
        engines = sorted(self.fleet.engines.values(), key=lambda each: each.id)
        return engines[number % len(engines)] if engines else None

    def drain(self, number, undo):
        if (engine := self.one(number)) is not None:
            self.engines.drain(engine, undo=undo)
            change = self.naive.drained.discard if undo else self.naive.drained.add
            change((place_of(engine), engine.id if engine.adapter.spec.is_started else None))
            if place_of(engine) in self.naive.added:
                self.naive.order(place_of(engine), self.naive.added[place_of(engine)])

    def remove(self, number):
        if (engine := self.one(number)) is None:
            return
        place, is_own = place_of(engine), engine.adapter.spec.is_started
        self.tasks.start(f"removal {time.perf_counter_ns()}", self.removal(engine, is_own))
        if not is_own:
            self.naive.removed.add(place)
            self.naive.drained.discard((place, None))
            self.naive.added.pop(place, None)
            self.naive.held.discard(place)
            self.naive.used.pop(place, None)

    async def removal(self, engine, is_own):
        try:
            await self.engines.remove(engine)
        except Conflict:
            assert is_own

    def change_server(self, url, change):
        server = self.servers[url]
        if change == "dies":
            server.is_up = False
            return
        server.is_up, server.started = True, server.started + 1
        server.model = change if change in MODELS else server.model
        if "ranks" in url:
            server.ranks = {"one": (0,), "two": (0, 1), "three": (0, 1, 2)}.get(change, server.ranks)

    def begin_request(self, number):
        if (engine := self.one(number)) is not None:
            engine.leases.add(request := Request())
            self.requests.append((engine, request))

    def end_requests(self):
        for engine, request in self.requests:
            engine.leases.discard(request)
        self.requests.clear()

    async def restart(self):
        self.end_requests()
        await self.stop()
        self.naive.held, self.naive.used, self.naive.known = set(), {}, {}
        self.naive.found, self.naive.told, self.finder = [], {}, Finder()
        self.start()

    async def happens(self, event):
        what, *more = event
        done = getattr(self, what)(*more)
        if done is not None:
            await done

    # What has to be so.

    def check(self):
        naive = self.naive
        expected = {
            claim.id: (place, claim.key, reasons_of(naive, place, claim))
            for place, claim in naive.used.items()
        }
        fleet = {
            each.id: (place_of(each), each.adapter.spec.api_key, each.drains)
            for each in self.fleet.engines.values()
        }
        assert fleet == expected
        for engine in self.fleet.engines.values():
            server = self.servers[engine.adapter.spec.url]
            if engine.drains:
                assert engine.state is EngineState.DRAINING
            else:
                assert engine.state is (EngineState.READY if server.is_up else EngineState.DOWN)
            if server.is_up:
                assert self.fleet.pool_of(engine).model == server.model
        self.check_always()
        self.check_adapters()

    def check_adapters(self):
        """Those that the fleet has are open, and no others."""
        used = [each for each in self.adapters if not each.is_closed and each.instance is not None]
        here = [each.adapter for each in self.fleet.engines.values() if each.adapter.instance is not None]
        assert {*used} == {*here}

    def check_claims(self):
        """Each engine is claimed, each claim is served or its id is taken."""
        parts = self.engines._parts
        named = [part for each in (*self.claims, *self.naive.found) for part in parts.split(each.entry())]
        added = {each.engine: reconciler._read(each.added) for each in self.book.marks() if each.added}
        claims = {(each.url, each.id, each.api_key.get_secret_value()) for each in named}
        engines = [each.adapter.spec for each in self.fleet.engines.values()]
        served, ids = {order_name(each) for each in engines}, {each.id for each in engines}
        assert len(served) == len(engines)
        drained = [each for each in self.fleet.engines.values() if each.drains]
        assert not any(DrainReason.LEAVING in each.drains for each in drained)
        for each in (each.adapter.spec for each in self.fleet.engines.values() if each not in drained):
            order = order_name(each)
            assert not self.book.is_removed(order)
            is_ordered = order in added and added[order].api_key.get_secret_value() == each.api_key
            assert is_ordered or (each.url, each.id, each.api_key) in claims
        for each in (*(each for at in self.claims for each in parts.split(at.entry())), *added.values()):
            order = order_name(each.spec())
            is_near = any(each.url == other.url for other in engines)
            assert self.book.is_removed(order) or order in served or each.id in ids or is_near

    def check_always(self):
        assert self.tasks.crashes == []
        for name, engine in self.fleet.engines.items():
            assert engine.id == name
            assert not engine.adapter.is_closed
            assert self.fleet.is_drained(engine) == (DrainReason.ORDERED in engine.drains)


def place_of(engine):
    return engine.adapter.spec.url, engine.adapter.spec.options.rank


def reasons_of(naive, place, claim):
    reasons = (
        {DrainReason.ORDERED} if (place, claim.id if claim.is_started else None) in naive.drained else set()
    )
    return reasons | (set() if claim.is_ready else {DrainReason.NOT_READY})


@st.composite
def events(draw, most):
    """Things that happen to a few engines, so that much happens to each."""
    claim = st.builds(Claim, st.sampled_from(IDS), st.sampled_from((*URLS, OWN)), st.sampled_from(KEYS))
    pool = draw(st.lists(claim, min_size=2, max_size=4))
    reached = [each for each in pool if not each.is_started] or [Claim("a", URLS[0], "k")]
    several = st.lists(st.sampled_from(pool), max_size=3, unique_by=(attrgetter("id"), attrgetter("url")))
    found = st.lists(
        st.builds(replace, st.sampled_from(reached), is_ready=st.booleans()),
        max_size=3,
        unique_by=(attrgetter("id"), attrgetter("url")),
    )
    numbers, one = st.integers(0, 3), st.sampled_from(reached)
    changes = st.sampled_from(("dies", "is back", *MODELS, "one", "two", "three"))
    event = st.one_of(
        st.tuples(st.just("name_in_settings"), several),
        st.tuples(st.just("find"), found),
        st.tuples(st.just("add"), one),
        st.tuples(st.just("hear"), one),
        st.tuples(st.just("remove"), numbers),
        st.tuples(st.just("drain"), numbers, st.booleans()),
        st.tuples(st.just("change_server"), st.sampled_from([each.url for each in pool]), changes),
        st.tuples(st.just("begin_request"), numbers),
        st.tuples(st.just("restart")),
    )
    waits = st.sampled_from((0.0, 0.01, 0.2, 1.0, 2 * GRACE_S))
    return draw(st.lists(st.tuples(event, waits), min_size=10, max_size=most))


@pytest.fixture(autouse=True)
def each_order_is_later(monkeypatch):
    monkeypatch.setattr(reconciler, "time", SimpleNamespace(time=count(time.time(), 1.0).__next__))


def run(play):
    async def in_virtual_time():
        with pytest.MonkeyPatch.context() as patch:
            VirtualClock(asyncio.get_running_loop(), patch)
            await play()

    with structlog.testing.capture_logs():
        asyncio.run(in_virtual_time())


def each(*happening):
    return example([(event, 0.0) for event in happening])


RANKS, GPU0, GPU1 = Claim("b", "http://ranks:1", "k"), Claim("a", URLS[0], "k"), Claim("a", URLS[1], "k")


@given(events(25))
@each(("add", RANKS), ("change_server", RANKS.url, "two"), ("name_in_settings", [RANKS]))
@each(("find", [GPU0]), ("remove", 0), ("find", []), ("find", [GPU0]))
@each(
    ("name_in_settings", [GPU0, Claim("b", URLS[1], "k"), Claim("c", RANKS.url, "k")]),
    ("hear", Claim("c", RANKS.url, "k")),
    ("name_in_settings", [GPU1, Claim("c", URLS[0], "k")]),
)
@settings(max_examples=120)
def test_the_fleet_becomes_what_settings_sources_and_orders_say(happening):
    async def play():
        world = World()
        for event, _ in happening:
            await world.happens(event)
            world.check_always()
            await asyncio.sleep(SETTLED_S)
            world.end_requests()
            world.naive.settle()
            world.check()
        await world.stop()

    run(play)


@given(events(30))
@each(
    ("add", GPU0),
    ("name_in_settings", [GPU1]),
    ("remove", 0),
    ("restart",),  # before another one has joined
)
@settings(max_examples=80)
def test_so_it_does_when_much_happens_at_once(happening):
    async def play():
        world = World(is_hurried=True)
        for event, wait_s in happening:
            await world.happens(event)
            await asyncio.sleep(wait_s)
            world.check_always()
        world.end_requests()
        await asyncio.sleep(SETTLED_S)
        world.check_always()
        world.check_claims()
        world.check_adapters()
        world.name_in_settings([])
        world.find([])
        await asyncio.sleep(SETTLED_S)
        added = {mark.engine for mark in world.book.marks() if mark.added}
        assert {order_name(each.adapter.spec) for each in world.fleet.engines.values()} <= added
        await world.stop()

    run(play)
