import pytest

from proxy.replay.policy import Kvpin
from proxy.replay.rules import LeastLoaded, Sticky, affinity, resolve
from tests.proxy.replay.making import ask, fleet_of


def choose(policy, *requests):
    return [policy.choose(0.0, request, ()).engine for request in requests]


class TestSticky:
    def test_a_session_stays_and_new_ones_spread(self):
        sessions = [ask((n,), session=str(n)) for n in range(3)]
        policy = Sticky(fleet_of(3), 0)
        homes = choose(policy, *sessions)
        assert sorted(homes) == [0, 1, 2]
        assert choose(policy, *sessions * 4) == homes * 4

    def test_of_those_with_as_few_in_flight_new_ones_go_to_whom_was_given_fewest(self):
        policy = Sticky(fleet_of(3), 0)
        for turn in range(4):
            homes = [choose(policy, ask((1,), session=f"{turn}/{n}"))[0] for n in range(3)]
            policy.in_flight = [0, 0, 0]
            assert sorted(homes) == [0, 1, 2]
        policy.in_flight = [0, 1, 1]
        assert choose(policy, ask((1,), session="loaded"), ask((1,), session="even"))[0] == 0

    def test_without_sessions_it_goes_by_what_is_not_common(self):
        policy = Sticky(fleet_of(2, common=1), 0)
        first, second = choose(policy, ask((1, 2)), ask((1, 3)))
        assert first != second
        assert choose(policy, ask((1, 2, 9)), ask((1, 3, 9))) == [first, second]


def test_affinity():
    fleet = fleet_of(common=1)
    assert affinity(ask((1, 2), session="s"), fleet) == "s"
    assert affinity(ask((1, 2, 3)), fleet) == affinity(ask((1, 2, 4)), fleet) == "2"
    short = {affinity(ask((1,), name=name), fleet) for name in range(3)}
    assert len(short | {"1", "2", ""}) == 6  # those with nothing of their own are nobody's next turn


def test_ties_are_broken_by_the_seed():
    def draws(seed):
        policy = LeastLoaded(fleet_of(4), seed)
        return [policy.least([1, 0, 0, 0]) for _ in range(20)]

    assert draws(1) == draws(1) != draws(2)
    assert set(draws(1)) == {1, 2, 3}
    assert LeastLoaded(fleet_of(4), 0).least([3, 2, 1, 2]) == 2
    assert LeastLoaded(fleet_of(3), 0).least([(1, 5), (0, 7), (0, 6)]) == 2


def test_an_unknown_name_is_told_with_those_there_are():
    with pytest.raises(ValueError, match=r"no policy 'x'; there are all, kvpin, .*oracle"):
        resolve(["kvpin", "x"])


def test_everything_that_kvpin_takes_it_gives_back():
    policy = Kvpin(fleet_of(), 0)
    for now in range(5):
        request = ask((1, 2, 10 + now), name=now)
        engine = policy.choose(float(now), request, ()).engine
        policy.first_token(now + 0.3, engine, request)
        policy.finished(now + 0.3, engine, request)
    placer = policy._placer
    assert [placer.index.counts(name)[3] for name in ("e0", "e1")] == [0, 0]
    assert [book.ledger.in_flight for book in placer.books.values()] == [0, 0]
    assert not policy._placed
