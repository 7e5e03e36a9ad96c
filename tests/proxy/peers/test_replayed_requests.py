"""The requests of another kvpin, replayed. Its messages are those that a kvpin makes, so that both sides are
tested."""

import random

import pytest
from msgspec.structs import replace

from engine_adapter import Role, Tier
from proxy.core.index.blocks import Chain
from proxy.core.peers.messages import OwnRequests, ToldEngine
from proxy.core.placement.load import Work
from proxy.fleet.fleet import Fleet
from proxy.peers.peer import Peer
from tests.fakes import add_ready

CHAIN = Chain(tuple(range(1, 11)), 165, 16)


class World:
    """A peer, and how it is followed here."""

    def __init__(self):
        self.own, self.fleet = OwnRequests(lambda: None), Fleet()
        self.engine = add_ready(self.fleet, "mine", gpu_blocks=100)
        self.pool = self.fleet.pools["m"]
        self.ended, end = [], self.pool.end

        def note_end(engine, placed, computed, report):
            self.ended.append(computed)
            end(engine, placed, computed, report)

        self.pool.end = note_end
        self.peer = Peer(1, self.fleet, 0.0)
        self.peer.here["theirs"] = "mine", True

    def begin(self, chain=CHAIN, **more):
        more = {"streams": True, "known": True, "session": 5, **more}
        return self.own.begun("theirs", Work(165), chain, **more)

    def send(self, *messages, now=1.0, lost=False):
        messages = [*self.own.take(), *messages]
        return None if lost else self.peer.receive(now, messages)

    def beat(self, now=1.0, late_s=0.0):
        self.send(self.own.heartbeat(now), now=now + late_s)

    def match(self, *engines):
        """The peer tells its engines, and this kvpin has some."""
        self.peer.engines = [ToldEngine("theirs", "http://gpu:1", False, "m", 16)]
        self.peer.match(1.0, [replace(self.peer.engines[0], id=each) for each in engines])

    def all(self):
        self.send(*self.own.in_flight(1.0))

    @property
    def in_flight(self):
        return self.peer.stats(0.0).in_flight

    @property
    def known(self):
        """Whether all requests are known here, how many are, and how many count as load."""
        return self.peer.in_step, self.in_flight, self.ledger.in_flight

    @property
    def placer(self):
        return self.pool.placer

    @property
    def ledger(self):
        return self.engine.ledger

    @property
    def pending(self):
        return self.pool.index.counts("mine")[3]


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr("proxy.fleet.pool.monotonic", lambda: 1.0)  # ends of requests, as all else here
    return World()


def test_a_request_is_replayed(world):
    telling = world.begin()
    world.send(now=1.0)
    assert (world.ledger.in_flight, world.pending) == (1, 10)
    assert world.placer.last_engine(5) == "mine"
    before = world.ledger.view(1.0).queue_s
    telling.tell(work=Work(80))
    world.send(now=1.0)
    assert 0 < world.ledger.view(1.0).queue_s < before
    telling.tell(step=1)
    world.send(now=2.0)
    assert world.ledger.view(2.0).decoding == 1
    telling.ended(80, None)
    world.send(now=3.0)
    assert world.ended == [80]
    assert (world.ledger.in_flight, world.pending, world.in_flight) == (0, 0, 0)


def test_a_request_whose_beginning_was_lost_is_missed_until_it_is_told(world):
    world.beat()
    world.begin().tell(step=1)
    world.send(lost=True)
    world.begin()
    world.send()
    assert world.known == (True, 1, 1)
    world.beat()
    assert (world.known, world.peer.missed) == ((False, 1, 1), 1)
    world.all()
    assert (world.known, world.peer.missed) == ((True, 2, 2), 1)
    assert world.ledger.view(1.0).decoding == 1


def test_a_request_whose_end_was_lost_ends_with_the_next_heartbeat(world):
    world.begin().ended(None, None) or world.begin().tell(step=1)
    telling = world.begin()
    world.send()
    telling.ended(80, None)
    world.send(lost=True)
    assert world.known == (False, 2, 2)
    world.beat()
    assert (world.known, world.peer.missed) == ((True, 1, 1), 0)
    assert world.ended == [None, None]


def test_an_engine_that_comes_later_gets_its_requests_then(world):
    world.peer.here.clear()
    running, waiting = world.begin(), world.begin()
    running.tell(work=Work(3))
    running.tell(step=1)
    gone = world.begin()
    gone.ended(1, None)
    world.send()
    assert (world.in_flight, world.ledger.in_flight) == (2, 0)
    for engines in ([], ["mine"], ["mine"]):
        world.match(*engines)
    assert (world.ledger.in_flight, world.ledger.view(1.0).decoding) == (2, 1)
    running.ended(1, None)
    waiting.ended(None, None)
    world.send()
    assert world.ended == [1, None]


def test_a_peer_that_hashes_otherwise_shares_its_load(world):
    world.peer.here["theirs"] = "mine", False
    world.begin()
    world.begin(None)
    world.send()
    assert (world.ledger.in_flight, world.pending) == (2, 0)


def go_on(world, rng, running):
    """A random step of a random request, or a new one. `running`: their work and their step."""
    telling = rng.choice([None, *running])
    if telling is None:
        running[world.begin(rng.choice([CHAIN, None]))] = Work(165), 0
    elif (step := rng.choice(["refine", "answer", "end"])) == "end":
        telling.ended(rng.choice([80, None]), None)
        del running[telling]
    elif not running[telling][1]:
        work, answered = (Work(rng.randrange(165)), 0) if step == "refine" else (running[telling][0], 1)
        telling.tell(work=work) if step == "refine" else telling.tell(step=1)
        running[telling] = work, answered


@pytest.mark.parametrize("seed", range(40))
def test_no_ghost_outlives_a_heartbeat_whatever_is_lost_repeated_or_out_of_order(world, seed):
    rng, running, told = random.Random(seed), {}, []  # noqa: S311 - no secret
    for _ in range(8):
        for _ in range(12):
            go_on(world, rng, running)
            told += world.own.take() * rng.randrange(3)  # lost, once, twice
            if rng.random() < 0.7:
                rng.shuffle(told)
                world.send(*told[: (cut := rng.randrange(len(told) + 1))])
                del told[:cut]
        world.beat()
        assert world.peer._requests.keys() <= {telling.now().id for telling in running}
        assert world.ledger.in_flight == world.in_flight
        if rng.random() < 0.5:
            world.all()
            waiting = [work for work, answered in running.values() if not answered]
            assert world.known == (True, len(running), len(running))
            assert world.ledger.view(1.0).decoding == len(running) - len(waiting)
            assert sorted(each.placed.work.computed for each in world.engine.of_peers.values()) == sorted(
                work.computed for work in waiting
            )
    world.own._in_flight.clear()
    world.beat()
    assert (world.known, world.pending, world.engine.of_peers) == ((True, 0, 0), 0, {})


def test_a_message_that_comes_after_a_later_one_changes_nothing(world):
    telling = world.begin(streams=False)
    telling.tell(work=Work(80))
    telling.tell(step=2)
    first, *rest = world.own.take()
    world.send(first, *rest, *rest)
    (request,) = world.peer._requests.values()
    assert request.placed.spent.computed == 80


def test_all_requests_of_a_lost_peer_are_over(world):
    world.begin(), world.begin(None).tell(step=1)
    world.send(now=4.0)
    assert world.peer.heard == 4.0
    world.peer.lose()
    assert (world.ledger.in_flight, world.pending, world.in_flight) == (0, 0, 0)
    assert world.ended == [None, None]
    assert world.pool.index.held("mine", Tier.GPU) == 0


def test_the_times_of_a_late_peer_teach_nothing_and_it_moves_no_conversation(world):
    def learned(now, late_s):
        """Whether rates were learned from a request, and whether its conversation moved."""
        world.beat(now, late_s)
        world.placer.begin(now, "other", Work(165), CHAIN, session=5)
        samples = len(world.placer.books["mine"].rates._samples)
        telling = world.begin()
        world.send(now=now)
        telling.tell(step=1)
        telling.ended(80, None)
        world.send(now=now + 1)
        after = len(world.placer.books["mine"].rates._samples)
        return after > samples, world.placer.last_engine(5) == "mine"

    world.placer.add("other", gpu_blocks=100)
    assert learned(100.0, 0.2) == (True, True)
    assert learned(110.0, 0.8) == (False, False)
    assert learned(120.0, 0.2) == (True, True)


def test_a_way_that_stays_long_is_no_delay_after_a_while(world):
    world.beat(0.0, 0.1)
    for second in range(1, 400):
        world.beat(float(second), 0.8)
        assert world.peer.is_late or second > 190
    assert not world.peer.is_late


def test_a_decode_leg_of_a_peer_is_no_prefill_here():
    world = World()
    world.begin(part=Role.DECODE)
    world.send()
    view = world.ledger.view(1.0)
    assert (view.in_flight, view.queue_s, view.decoding) == (1, 0, 0)
    assert world.pending == 0
