from collections import Counter

from proxy.replay.simple import BoundedHash, LeastLoaded, RoundRobin, Sticky, affinity
from tests.proxy.replay.making import ask, fleet_of


def choose(policy, *requests):
    return [policy.choose(0.0, request, ()).engine for request in requests]


def test_round_robin():
    assert choose(RoundRobin(fleet_of(3), 0), *[ask((1,))] * 5) == [0, 1, 2, 0, 1]


def test_least_loaded():
    policy = LeastLoaded(fleet_of(3), 0)
    assert sorted(choose(policy, *[ask((1,))] * 3)) == [0, 1, 2]
    policy.finished(0.0, 1, ask((1,)))
    assert choose(policy, ask((1,))) == [1]


class TestSticky:
    def test_a_session_stays_and_new_ones_spread(self):
        sessions = [ask((n,), session=str(n)) for n in range(3)]
        policy = Sticky(fleet_of(3), 0)
        homes = choose(policy, *sessions)
        assert sorted(homes) == [0, 1, 2]
        assert choose(policy, *sessions * 4) == homes * 4

    def test_without_sessions_it_goes_by_what_is_not_common(self):
        policy = Sticky(fleet_of(2, common=1), 0)
        first, second = choose(policy, ask((1, 2)), ask((1, 3)))
        assert first != second
        assert choose(policy, ask((1, 2, 9)), ask((1, 3, 9))) == [first, second]


class TestBoundedHash:
    def test_a_prompt_has_its_engine(self):
        policy = BoundedHash(fleet_of(4), 0)
        for key in range(40):
            homes = set()
            for _ in range(3):
                homes.update(choose(policy, ask((key,))))
                policy.in_flight = [0] * 4
            assert len(homes) == 1

    def test_prompts_are_spread_evenly(self):
        policy, owned = BoundedHash(fleet_of(4), 0), Counter()
        for key in range(2000):
            owned.update(choose(policy, ask((key,))))
            policy.in_flight = [0] * 4
        assert 350 < min(owned.values()) <= max(owned.values()) < 650

    def test_the_bound_is_a_quarter_over_the_mean(self):
        policy = BoundedHash(fleet_of(4), 0)
        (home,) = choose(policy, ask((1,)))
        # With this one 16 in flight, 4 on average: an engine takes a fifth, and no sixth.
        policy.in_flight = [4 if at == home else 11 / 3 for at in range(4)]
        assert choose(policy, ask((1,))) == [home]
        policy.in_flight = [5 if at == home else 10 / 3 for at in range(4)]
        assert choose(policy, ask((1,))) != [home]

    def test_seeds_are_other_rings(self):
        def homes(seed):
            policy, found = BoundedHash(fleet_of(4), seed), []
            for key in range(50):
                found += choose(policy, ask((key,)))
                policy.in_flight = [0] * 4
            return found

        assert homes(1) == homes(1) != homes(2)


def test_affinity():
    fleet = fleet_of(common=1)
    assert affinity(ask((1, 2), session="s"), fleet) == "s"
    assert affinity(ask((1, 2, 3)), fleet) == affinity(ask((1, 2, 4)), fleet) == "2"
    assert affinity(ask((1,)), fleet) == ""
