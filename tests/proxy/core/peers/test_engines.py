"""What counts of the orders about each engine, whichever kvpin they were given to."""

import heapq
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.peers import engines as module
from proxy.core.peers.engines import (
    MAX_AHEAD_S,
    SETTLE_S,
    Claim,
    EngineBook,
    EngineMark,
    OwnClaim,
    decode_marks,
    encode_marks,
    holder_of,
)

BID, HELD = Claim(1, is_held=False), Claim(1, is_held=True)


def owner_at(now=0.0, kvpin=5):
    own = OwnClaim(kvpin)
    own.decide(now, {}, may_bid=True, is_alone=True)
    return own


def test_one_that_is_alone_owns_the_engine_at_once():
    own = owner_at()
    assert own.is_owner
    assert own.claim == HELD


def test_one_that_is_not_sure_to_be_alone_bids_first():
    own = OwnClaim(5)
    own.decide(0.0, {}, may_bid=True)
    assert own.is_bidding
    assert own.claim == BID
    own.decide(SETTLE_S - 0.01, {9: BID}, may_bid=True)  # drew a greater number
    assert not own.is_owner
    own.decide(SETTLE_S, {9: BID}, may_bid=True)
    assert own.is_owner


def test_one_that_nobody_would_hear_does_not_bid_and_an_owner_stays():
    own = OwnClaim(5)
    own.decide(0.0, {}, may_bid=False, is_alone=True)
    assert own.claim is None
    own = owner_at()
    own.decide(1.0, {}, may_bid=False)
    assert own.is_owner


def test_a_bid_gives_way_to_a_better_one_and_to_an_owner():
    for better in (HELD, Claim(2, is_held=False), BID):
        own = OwnClaim(5)
        own.decide(0.0, {}, may_bid=True)
        own.decide(0.1, {3: better}, may_bid=True)
        assert own.claim is None
        own.decide(9.0, {3: better}, may_bid=True)
        assert own.claim is None
        own.decide(10.0, {}, may_bid=True)
        assert own.claim == Claim(better.epoch + 1, is_held=False)


def test_an_owner_stays_when_others_come():
    own = owner_at()
    own.decide(1.0, {3: Claim(7, is_held=False)}, may_bid=True)
    assert own.is_owner


def test_of_two_owners_the_later_one_stays():
    own = owner_at()
    own.decide(1.0, {9: Claim(2, is_held=True)}, may_bid=True)
    assert not own.is_owner
    assert own.claim is None


def test_one_that_is_locked_out_leaves_the_engine_to_an_owner():
    own = owner_at()
    own.is_locked_out = True
    own.decide(1.0, {}, may_bid=True)
    assert own.claim == BID
    assert own.is_owner  # it goes on trying
    own.decide(2.0, {9: HELD}, may_bid=True)
    assert own.claim is None


def test_one_that_stood_still_bids_again():
    own = owner_at()
    own.doubt(20.0)
    assert own.is_bidding
    own.doubt(20.5)
    own.decide(20.0 + SETTLE_S, {}, may_bid=True)
    assert own.is_owner


def test_who_holds_an_engine():
    assert holder_of({}) is None
    assert holder_of({3: Claim(9, is_held=False)}) is None
    assert holder_of({3: HELD, 4: HELD, 5: Claim(9, is_held=False)}) == 3


# --- many ----------------------------------------------------------------------------------------

TICK_S = 0.05
LATE_S = SETTLE_S * 0.45  # the latest that a message comes
LOST_S = 3.0


@dataclass
class Kvpin:
    own: OwnClaim
    heard: dict[int, Claim] = field(default_factory=dict)
    told: Claim | None = None
    lives: bool = True


class World:
    """Kvpins that tell each other their claims; messages take a while, and those of one come in order."""

    def __init__(self, delays):
        self.kvpins: dict[int, Kvpin] = {}
        self.now, self.delays, self.at = 0.0, delays, 0
        self.events: list[tuple] = []
        self.order = 0
        self.last: dict[tuple[int, int], float] = {}

    def later(self, after, do):
        self.order += 1
        heapq.heappush(self.events, (self.now + after, self.order, do))

    def send(self, source, target, do):
        self.at += 1
        arrives = max(
            self.now + self.delays[self.at % len(self.delays)] * LATE_S, self.last.get((source, target), 0.0)
        )
        self.last[source, target] = arrives
        self.later(arrives - self.now, do)

    def run(self, until):
        while self.events and self.events[0][0] <= until:
            self.now, _, do = heapq.heappop(self.events)
            do()
            owners = [number for number, each in self.kvpins.items() if each.lives and each.own.is_owner]
            assert len(owners) <= 1, (self.now, owners)
        self.now = until

    def join(self, number):
        is_first = not any(each.lives for each in self.kvpins.values())
        self.kvpins[number] = Kvpin(OwnClaim(number))
        for other in list(self.kvpins):
            if other != number:
                self.send(number, other, lambda other=other: self.tell(other, [number]))
        self.tick(number, is_alone=is_first)

    def tick(self, number, *, is_alone=False):
        if self.kvpins[number].lives:
            self.decide(number, is_alone=is_alone)
            self.later(TICK_S, lambda: self.tick(number))

    def decide(self, number, *, is_alone=False):
        kvpin = self.kvpins[number]
        kvpin.own.decide(self.now, kvpin.heard, may_bid=True, is_alone=is_alone)
        if kvpin.own.claim != kvpin.told:
            kvpin.told = kvpin.own.claim
            self.tell(number, [other for other in self.kvpins if other != number])

    def tell(self, number, targets):
        if not self.kvpins[number].lives:
            return
        claim = self.kvpins[number].told
        for target in targets:
            self.send(number, target, lambda target=target: self.hear(target, number, claim))

    def hear(self, number, source, claim):
        kvpin = self.kvpins[number]
        kvpin.heard.pop(source, None)
        if claim is not None and self.kvpins[source].lives:
            kvpin.heard[source] = claim
        if kvpin.lives:
            self.decide(number)

    def end(self, number, *, says_so):
        self.kvpins[number].lives = False
        for other, kvpin in self.kvpins.items():
            if kvpin.lives:
                after = 0.0 if says_so else LOST_S
                self.later(
                    after,
                    lambda other=other: self.send(number, other, lambda: self.hear(other, number, None)),
                )


STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "kill"]), st.integers(0, 5), st.floats(0, 2 * SETTLE_S)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(STEPS, st.lists(st.floats(0, 1), min_size=1, max_size=17), st.permutations(range(12)))
def test_among_kvpins_that_hear_each_other_there_are_never_two_owners_and_one_in_the_end(
    steps, delays, numbers
):
    world, numbers = World(delays), list(numbers)
    for what, which, pause in steps:
        living = [number for number, each in world.kvpins.items() if each.lives]
        if what == "join" or not living:
            world.join(numbers.pop())
        else:
            world.end(living[which % len(living)], says_so=what == "leave")
        world.run(world.now + pause)
    world.run(world.now + LOST_S + 4 * SETTLE_S)
    living = [each for each in world.kvpins.values() if each.lives]
    assert [each.own.is_owner for each in living].count(True) == bool(living)


NOW = 1000.0


def test_books_agree_whatever_the_order_in_which_they_hear():
    rng = random.Random(7)  # noqa: S311 - no secret
    marks = [
        EngineMark(rng.choice("abc"), rng.random() < 0.5, float(rng.randrange(9)), rng.random() < 0.5)
        for _ in range(60)
    ]
    books = [EngineBook() for _ in range(3)]
    for book in books:
        for mark in rng.sample(marks, len(marks)):
            book.merge([mark], now=NOW)
    assert {frozenset(book.marks()) for book in books} == {frozenset(books[0].marks())}
    assert len(books[0].marks()) == 3


def test_a_later_order_counts_whatever_the_clock_says():
    book, heard = EngineBook(), []
    book.listeners.append(heard.append)
    book.drain("a", drained=True, now=100.0)
    book.drain("a", drained=False, now=50.0)
    assert not book.is_drained("a")
    book.merge([EngineMark("a", True, 100.0)], now=NOW)  # the older order comes late
    assert not book.is_drained("a")
    assert heard == [["a"], ["a"]]


def test_removing_and_adding_an_engine_ends_the_order_to_drain_it_at_all_kvpins():
    book, other, heard = EngineBook(), EngineBook(), []
    other.listeners.append(heard.append)
    book.drain("a", drained=True, now=5.0)
    other.merge(book.marks(), now=NOW)
    book.remove("a", now=1.0)
    assert (book.is_drained("a"), book.is_removed("a")) == (False, True)
    book.add("a", b"{}", now=1.0)
    assert (book.is_drained("a"), book.is_removed("a"), book.added("a")) == (False, False, b"{}")
    other.merge(decode_marks(encode_marks(book.marks())), now=NOW)
    assert other.marks() == book.marks()
    assert heard == [["a"], ["a"]]
    other.drain("a", drained=True, now=1.0)
    assert other.added("a") == b"{}", "an order to drain it takes nothing else back"


def test_an_engine_that_is_readmitted_is_as_its_settings_say():
    book = EngineBook()
    book.remove("a", now=1.0)
    book.readmit("a", now=1.0)
    assert (book.is_removed("a"), book.added("a")) == (False, b"")


def test_undoing_what_was_never_drained_leaves_nothing():
    book = EngineBook()
    book.drain("a", drained=False, now=1.0)
    assert book.marks() == []


def test_the_oldest_orders_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(module, "MAX_MARKS", 2)
    book = EngineBook()
    for number, name in enumerate("abc"):
        book.drain(name, drained=True, now=float(number))
    assert decode_marks(encode_marks(book.marks())) == [
        EngineMark("c", True, 2.0),
        EngineMark("b", True, 1.0),
    ]


def test_a_book_that_hears_only_of_undone_drains_has_a_limit_too(monkeypatch):
    monkeypatch.setattr(module, "MAX_MARKS", 2)
    book = EngineBook()
    book.merge([EngineMark(name, drained=False, at=1.0) for name in "abc"], now=NOW)
    assert len(book.marks()) == 2


def test_an_undone_drain_that_was_never_known_is_no_news():
    """An engine that drains for another reason, as its source says, goes on draining."""
    book, heard = EngineBook(), []
    book.listeners.append(heard.append)
    book.merge([EngineMark("a", drained=False, at=1.0)], now=NOW)
    assert heard == []


@pytest.mark.parametrize("at", [NOW + MAX_AHEAD_S + 1, 1e300, math.inf, math.nan])
def test_an_order_from_the_future_does_not_count(at):
    """No later order could undo it."""
    book = EngineBook()
    assert not book.merge(
        [EngineMark("a", drained=True, at=at), EngineMark("b", drained=True, at=NOW)], now=NOW
    )
    assert [mark.engine for mark in book.marks()] == ["b"]
    assert book.merge([EngineMark("a", drained=True, at=NOW + MAX_AHEAD_S)], now=NOW)
    book.drain("a", drained=False, now=NOW)
    assert not book.is_drained("a")
