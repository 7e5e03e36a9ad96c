from proxy.core.index.match import Match
from proxy.replay.policy import PolicyChoice, Seeing, cached_tokens
from tests.proxy.replay.making import ask, fleet_of


class Looking(Seeing):
    def choose(self, now, request, engines):
        return PolicyChoice(0)


def test_ties_are_broken_by_the_seed():
    def draws(seed):
        policy = Looking(fleet_of(4), seed)
        return [policy.least([1, 0, 0, 0]) for _ in range(20)]

    assert draws(1) == draws(1) != draws(2)
    assert set(draws(1)) == {1, 2, 3}
    assert Looking(fleet_of(4), 0).least([3, 2, 1, 2]) == 2
    assert Looking(fleet_of(3), 0).least([(1, 5), (0, 7), (0, 6)]) == 2


def test_cached_tokens_leave_one_to_compute():
    assert cached_tokens(ask((1, 2), tail=1).chain, Match(gpu=1, host=1)) == 200
    assert cached_tokens(ask((1, 2), tail=0).chain, Match(gpu=2)) == 100
