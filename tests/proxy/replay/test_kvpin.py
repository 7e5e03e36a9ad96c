from engine_adapter.types import Tier
from proxy.replay.policy import Kvpin
from tests.proxy.replay.making import ask, fleet_of


def choose(policy, *requests, now=0.0):
    return [policy.choose(now, request, ()) for request in requests]


def answered(policy, request, now=0.0):
    """The request served without a wait; returns where."""
    choice = choose(policy, request, now=now)[0]
    policy.stored(choice.engine, Tier.GPU, request.chain.hashes)
    policy.first_token(now + 0.3, choice.engine, request)
    policy.finished(now + 0.3, choice.engine, request)
    return choice.engine


def test_everything_it_takes_it_gives_back():
    policy = Kvpin(fleet_of(), 0)
    for name in range(5):
        answered(policy, ask((1, 2, name), name=name), now=float(name))
    placer = policy._placer
    assert [placer.index.pending(name) for name in ("e0", "e1")] == [0, 0]
    assert [book.ledger.in_flight for book in placer.books.values()] == [0, 0]
    assert not policy._placed


def test_events_reach_its_index():
    policy = Kvpin(fleet_of(), 0)
    policy.stored(0, Tier.HOST, [1, 2])
    policy.stored(0, Tier.GPU, [1])
    policy.removed(0, Tier.HOST, [2])
    assert choose(policy, ask((1, 2))) == [(0, 100)]
