import heapq
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.peers.messages import SETTLE_S, Claim, OwnClaim, holder_of

BID, HELD = Claim(1, is_held=False), Claim(1, is_held=True)


def owner_at(now=0.0, kvpin=5):
    own = OwnClaim(kvpin)
    own.decide(now, {}, may_bid=True, is_alone=True)
    return own


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
