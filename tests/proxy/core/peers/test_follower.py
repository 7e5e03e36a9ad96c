"""One peer as seen here. Its messages are those that a kvpin makes, so that both sides are tested."""

from dataclasses import dataclass, field

import pytest

from engine_adapter import Role, Tier
from proxy.core.index.blocks import Chain
from proxy.core.peers.follower import Follower, RoundTrip
from proxy.core.peers.messages import AskListing, Batch, Heard, Heartbeat
from proxy.core.peers.telling import OwnRequests
from proxy.core.placement.load import Work
from proxy.core.placement.placer import Placer

CHAIN = Chain(tuple(range(1, 11)), 165, 16)


@dataclass
class Here:
    """An engine of this kvpin."""

    placer: Placer
    engine: str = "mine"
    tokens_per_block: int | None = 16
    ended: list = field(default_factory=list)
    steps: list = field(default_factory=list)

    def begun(self, placed):
        self.steps.append(("begun", placed.hashes))

    def answered(self, placed):
        self.steps.append(("answered", placed.hashes))

    def end(self, placed, computed, report):
        self.ended.append(computed)
        self.placer.end(9.0, placed, computed, report)
        self.placer.settled(placed)


class World:
    """A peer, and how it is followed here."""

    def __init__(self):
        self.own = OwnRequests(lambda: None)
        self.here = Here(Placer(16))
        self.here.placer.add("mine", gpu_blocks=100)
        self.sites = {"theirs": self.here}
        self.follower = Follower(1, lambda _, engine: self.sites.get(engine), 0.0)
        self.number = 0

    def begin(self, chain=CHAIN, **more):
        more = {"streams": True, "known": True, "session": 5, **more}
        return self.own.begun("theirs", Work(165), chain, **more)

    def send(self, *messages, now=1.0, lost=False):
        self.number += 1
        batch = Batch(self.number, [*self.own.take(), *messages])
        return None if lost else self.follower.receive(now, batch)

    def listing(self):
        return self.send(*self.own.listing())

    @property
    def ledger(self):
        return self.here.placer.books["mine"].ledger

    @property
    def pending(self):
        return self.here.placer.index.pending("mine")


@pytest.fixture
def world():
    return World()


def test_a_request_is_replayed(world):
    telling = world.begin()
    world.send(now=1.0)
    assert (world.ledger.in_flight, world.pending) == (1, 10)
    assert world.here.placer.last_engine(5) == "mine"
    before = world.ledger.view(1.0).queue_s
    telling.refined(Work(80))
    world.send(now=1.0)
    assert 0 < world.ledger.view(1.0).queue_s < before
    telling.first_token()
    world.send(now=2.0)
    assert world.ledger.view(2.0).decoding == 1
    telling.ended(80, None)
    world.send(now=3.0)
    assert world.here.ended == [80]
    assert (world.ledger.in_flight, world.pending, world.follower.in_flight) == (0, 0, 0)


def test_an_answer_that_does_not_stream(world):
    telling = world.begin(streams=False)
    telling.answered()
    telling.ended(0, None)
    world.send()
    assert world.here.ended == [0]


def test_what_is_not_about_requests_is_handed_back(world):
    ask = AskListing(3, contents=True)
    assert world.send(ask, Heartbeat(0, 0)) == [ask]


def test_all_is_known_after_a_listing(world):
    world.begin().first_token()
    world.send(lost=True)
    world.begin()
    world.send()
    assert (world.follower.in_step, world.follower.in_flight) == (False, 1)
    world.listing()
    assert (world.follower.in_step, world.follower.in_flight, world.ledger.in_flight) == (True, 2, 2)
    assert world.ledger.view(1.0).decoding == 1
    assert world.follower.gaps == 0  # it was not in step before


def test_a_gap_is_noticed_and_a_listing_heals_it(world):
    world.listing()
    first, second = world.begin(), world.begin()
    world.send()
    first.ended(None, None)
    world.send(lost=True)
    second.first_token()
    world.send()
    assert (world.follower.in_step, world.follower.gaps) == (False, 1)
    assert world.follower.in_flight == 2
    world.listing()
    assert (world.follower.in_step, world.follower.in_flight, world.ledger.in_flight) == (True, 1, 1)


def test_a_listing_of_which_a_part_is_lost_counts_for_nothing(world):
    world.begin()
    head, *rest = world.own.listing()
    world.own.take()
    world.send(head)
    world.send(lost=True)
    world.send(*rest)
    assert not world.follower.in_step


def test_a_listing_changes_nothing_for_who_knows_all(world):
    world.listing()
    world.begin().first_token()
    world.send()
    world.listing()
    assert world.ledger.placed == 1
    assert world.ledger.view(1.0).decoding == 1
    assert world.follower.in_step


def test_a_divergence_is_noticed(world):
    world.listing()
    world.begin()
    world.send(Heartbeat(1, 0))
    assert (world.follower.in_step, world.follower.divergences, world.follower.gaps) == (False, 1, 0)
    world.listing()
    assert world.follower.in_step


def test_messages_of_unknown_requests_are_ignored(world):
    telling = world.begin()
    world.send(lost=True)
    telling.refined(Work(1))
    telling.first_token()
    telling.ended(1, None)
    world.send()
    assert world.here.ended == []


def test_an_engine_that_comes_later_gets_its_requests_then(world):
    world.sites.clear()
    running, waiting = world.begin(), world.begin()
    running.refined(Work(3))
    running.first_token()
    gone = world.begin()
    gone.ended(1, None)
    world.send()
    assert (world.follower.in_flight, world.ledger.in_flight) == (2, 0)
    world.follower.place_late(1.0)
    world.sites["theirs"] = world.here
    world.follower.place_late(1.0)
    world.follower.place_late(1.0)
    assert (world.ledger.in_flight, world.ledger.view(1.0).decoding) == (2, 1)
    running.ended(1, None)
    waiting.ended(None, None)
    world.send()
    assert world.here.ended == [1, None]


def test_a_peer_that_hashes_otherwise_shares_its_load(world):
    world.here.tokens_per_block = None
    world.begin()
    world.begin(None)
    world.send()
    assert (world.ledger.in_flight, world.pending) == (2, 0)


def test_all_requests_of_a_lost_peer_are_over(world):
    world.begin(), world.begin(None).first_token()
    world.send(now=4.0)
    assert world.follower.heard == 4.0
    world.follower.lose()
    assert (world.ledger.in_flight, world.pending, world.follower.in_flight) == (0, 0, 0)
    assert world.here.ended == [None, None]
    assert world.here.placer.index.held("mine", Tier.GPU) == 0


def test_an_old_batch_is_ignored(world):
    world.send()
    old = Batch(1, [*world.own.take()])
    world.begin()
    world.send()
    world.listing()
    old.messages.append(Heartbeat(0, 0))
    assert world.follower.receive(9.0, old) == []
    assert (world.follower.in_step, world.follower.heard) == (True, 1.0)


def test_requests_of_a_peer_that_is_behind_count_when_they_are_over(world):
    world.listing()
    world.begin().first_token()
    world.send()
    world.follower.note_behind(2.0, is_behind=True)
    assert (world.ledger.in_flight, world.pending, world.follower.in_flight) == (0, 0, 1)
    telling, failed = world.begin(session=6), world.begin()
    telling.first_token()
    world.send()
    world.follower.place_late(2.0)
    assert (world.ledger.in_flight, world.pending) == (0, 0)
    telling.ended(80, None)
    failed.ended(None, None)
    world.send(world.own.heartbeat(), now=3.0)
    assert world.here.ended == [None, 80]
    assert world.here.placer.last_engine(6) == "mine"
    assert (world.ledger.in_flight, world.pending, world.follower.in_step) == (0, 0, True)
    world.follower.note_behind(4.0, is_behind=False)
    assert (world.ledger.in_flight, world.ledger.view(4.0).decoding, world.pending) == (1, 1, 10)


def test_a_peer_that_is_behind_moves_no_conversation(world):
    world.follower.note_behind(2.0, is_behind=True)
    world.here.placer.add("other", gpu_blocks=100)
    world.here.placer.begin(1.0, "other", Work(165), CHAIN, session=5)
    world.begin().ended(80, None)
    world.send()
    assert world.here.placer.last_engine(5) == "other"


def test_a_round_trip_is_measured_by_the_own_clock_alone():
    here, there = RoundTrip(), RoundTrip()
    assert there.answer(0.0, 1) is None
    there.heard(5001.0, sent=10.0)  # of its clock, and of this one
    answer = there.answer(5001.7, 1)
    assert (answer.of, answer.sent) == (1, 10.0)
    here.measure(10.9, answer)
    assert here.seconds is None
    here.measure(10.9, answer)
    assert round(here.seconds, 3) == 0.2


def test_several_long_trips_in_succession_are_a_delay():
    trip = RoundTrip()
    for seconds, is_behind in ((0.1, False), (2.0, False), (2.1, True), (0.2, False), (1.9, False)):
        trip.measure(100.0 + seconds, Heard(1, 99.0, 1.0))
        assert trip.is_behind is is_behind


def test_a_decode_leg_of_a_peer_is_no_prefill_here():
    world = World()
    world.listing()
    world.begin(part=Role.DECODE)
    world.send()
    view = world.ledger.view(1.0)
    assert (view.in_flight, view.queue_s, view.decoding) == (1, 0, 0)
    assert world.pending == 0
