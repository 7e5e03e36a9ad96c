from collections import Counter

from proxy.replay.rules import BoundedHash, Sticky, affinity
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


def test_affinity():
    fleet = fleet_of(common=1)
    assert affinity(ask((1, 2), session="s"), fleet) == "s"
    assert affinity(ask((1, 2, 3)), fleet) == affinity(ask((1, 2, 4)), fleet) == "2"
    short = {affinity(ask((1,), name=name), fleet) for name in range(3)}
    assert len(short | {"1", "2", ""}) == 6  # those with nothing of their own are nobody's next turn
