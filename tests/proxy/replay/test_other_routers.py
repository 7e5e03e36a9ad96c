import pytest

from engine_adapter.types import Tier
from proxy.replay.rules import DynamoLike, LlmdDefault, MinTtft, SglangCacheAware
from tests.proxy.replay.making import Telling, ask, fleet_of


def choose(policy, *requests, now=0.0):
    return [policy.choose(now, request, ()).engine for request in requests]


class TestSglang:
    def test_more_than_three_tenths_of_the_prompt_draw(self):
        policy = SglangCacheAware(fleet_of(), 0)
        (home,) = choose(policy, ask((1, 2, 3), tail=0))
        policy.in_flight = [5 if at == home else 0 for at in range(2)]
        assert choose(policy, ask((1, 2, 3, 4, 5, 6, 7, 8, 9), tail=0)) == [home]
        # Three of exactly ten are not more than three tenths.
        policy = SglangCacheAware(fleet_of(), 0)
        (home,) = choose(policy, ask((1, 2, 3), tail=0))
        policy.in_flight = [5 if at == home else 0 for at in range(2)]
        assert choose(policy, ask((1, 2, 3, 14, 15, 16, 17, 18, 19, 20), tail=0)) == [1 - home]

    @pytest.mark.parametrize(
        ("here", "there", "stays"), [(64, 0, True), (65, 0, False), (195, 130, True), (196, 130, False)]
    )
    def test_more_than_64_and_half_as_many_again_release(self, here, there, stays):
        policy = SglangCacheAware(fleet_of(), 0)
        (home,) = choose(policy, ask((1, 2)))
        policy.in_flight[home], policy.in_flight[1 - home] = here, there
        assert (choose(policy, ask((1, 2))) == [home]) is stays

    def test_any_of_those_it_was_sent_to_is_drawn(self):
        policy = SglangCacheAware(fleet_of(3), 0)
        (home,) = choose(policy, ask((1, 2)))
        policy.in_flight = [100, 100, 100]
        policy.in_flight[home - 1] = 0
        assert choose(policy, ask((1, 2))) == [(home - 1) % 3]
        policy.in_flight = [0, 0, 0]
        drawn = choose(policy, *[ask((1, 2))] * 30)
        assert set(drawn) == {home, (home - 1) % 3}

    def test_what_matches_nothing_goes_to_the_least_loaded_of_several_the_smallest_tree(self):
        policy = SglangCacheAware(fleet_of(), 0)
        (home,) = choose(policy, ask((1, 2, 3)))
        policy.in_flight = [0, 0]
        assert choose(policy, ask((7,))) == [1 - home]
        policy.in_flight = [0, 0]
        assert choose(policy, ask((8,))) == [1 - home]
        policy.in_flight = [0 if at == home else 1 for at in range(2)]
        assert choose(policy, ask((9,))) == [home]

    def test_it_does_not_see_evictions_and_has_a_bound_of_its_own(self, monkeypatch):
        monkeypatch.setattr(SglangCacheAware, "MAX_TREE_CHARS", 3 * 400)
        policy = SglangCacheAware(fleet_of(), 0)
        (home,) = choose(policy, ask((1, 2)))
        policy.removed(home, Tier.GPU, [1, 2])
        policy.in_flight = [5 if at == home else 0 for at in range(2)]
        assert choose(policy, ask((1, 2, 3)), now=119.0) == [home]
        policy.in_flight = [0 if at == home else 5 for at in range(2)]
        choose(policy, ask((7, 8)), now=119.5)
        # Five blocks in a tree for three: at 120 s the oldest two go, which are 3 and 2.
        policy.in_flight = [5 if at == home else 0 for at in range(2)]
        assert choose(policy, ask((1, 2, 3), tail=99), now=120.0) == [1 - home]

    def test_what_one_engine_forgets_another_may_know(self, monkeypatch):
        monkeypatch.setattr(SglangCacheAware, "MAX_TREE_CHARS", 2 * 400)
        policy = SglangCacheAware(fleet_of(), 0)
        (home,) = choose(policy, ask((1, 2)))
        policy.in_flight = [100 if at == home else 0 for at in range(2)]
        choose(policy, ask((1, 2)))
        policy.in_flight = [5 if at == home else 0 for at in range(2)]
        assert choose(policy, ask((3, 4))) == [1 - home]
        policy.in_flight = [5 if at != home else 0 for at in range(2)]
        assert choose(policy, *[ask((1, 2))] * 5, now=120.0) == [home] * 5


class TestLlmd:
    def test_four_fifths_of_the_prompt_keep_an_engine(self):
        for held, kept in ((8, True), (7, False)):
            policy = LlmdDefault(fleet_of(), 0)
            policy.stored(0, Tier.GPU, range(held))
            policy._tokens = [1000, 0]
            assert (choose(policy, ask(range(10), tail=0)) == [0]) is kept

    def test_what_lies_in_host_memory_scores_four_fifths(self):
        policy = LlmdDefault(fleet_of(), 0)
        policy.stored(0, Tier.HOST, range(5))
        policy.stored(1, Tier.GPU, range(4))
        assert choose(policy, ask(range(9), tail=0)) in ([0], [1])
        assert sorted(policy._tokens) == [0, 500]
        for host, kept in ((10, False), (9, True), (5, True)):
            policy = LlmdDefault(fleet_of(), 0)
            policy.stored(0, Tier.GPU, range(10 - host))
            policy.stored(0, Tier.HOST, range(10 - host, 10))
            policy._tokens = [1500, 0]
            # The last token of 1001 lies nowhere: with the rest in host memory that is not quite 0.8 of them.
            assert (choose(policy, ask(range(10), tail=1)) == [0]) is kept

    def test_18_s_more_in_flight_release(self):
        for tokens, kept in ((18_000, True), (18_001, False)):
            policy = LlmdDefault(fleet_of(), 0)
            policy.stored(0, Tier.GPU, [1, 2])
            policy._tokens = [tokens, 0]
            assert (choose(policy, ask((1, 2))) == [0]) is kept

    def test_otherwise_the_fewest_uncached_tokens(self):
        policy = LlmdDefault(fleet_of(), 0)
        policy.stored(1, Tier.GPU, [1, 2])
        assert choose(policy, ask((1, 2, 3, 4, 5))) == [1]
        policy._tokens = [0, 201]
        assert choose(policy, ask((1, 2, 8, 9, 10))) == [0]

    def test_a_burst_of_one_prefix_gathers(self):
        policy = LlmdDefault(fleet_of(), 0)
        prompts = [ask(range(9), tail=0, name=name) for name in range(5)]
        assert len(set(choose(policy, *prompts))) == 1

    def test_first_tokens_end_what_is_in_flight(self):
        policy = LlmdDefault(fleet_of(), 0)
        request = ask((1, 2), tail=0)
        (home,) = choose(policy, request)
        assert policy._tokens[home] == 200
        policy.first_token(0.1, home, request)
        assert policy._tokens == [0, 0]
        assert policy.matches(request.chain)[home].blocks == 0


class TestDynamo:
    def test_prefill_beyond_the_overlap_and_blocks_in_use(self):
        policy = DynamoLike(fleet_of(), 0)
        policy.stored(1, Tier.GPU, [1, 2])
        assert choose(policy, ask((1, 2, 3), tail=0)) == [1]
        # In flight there: a block of prefill and three in use, as much as is cached is not enough.
        assert choose(policy, ask((1, 2, 8), tail=0, name=1)) == [1]
        assert choose(policy, ask((1, 2, 9), tail=0, name=2)) in ([0], [1])

    @pytest.mark.parametrize(("tier", "blocks"), [(Tier.GPU, 4), (Tier.HOST, 3), (Tier.DISK, 1)])
    def test_credits_by_tier(self, tier, blocks):
        for load, home in ((100 * blocks - 1, 0), (100 * blocks + 1, 1)):
            policy = DynamoLike(fleet_of(), 0)
            policy.stored(0, tier, [1, 2, 3, 4])
            policy._prefill = [load, 0]
            assert choose(policy, ask((1, 2, 3, 4))) == [home]

    def test_blocks_that_running_requests_share_count_once(self):
        policy = DynamoLike(fleet_of(), 0)
        request = ask((1, 2, 3), tail=0)
        (home,) = choose(policy, request)
        assert policy._in_use(home, (1, 2, 9)) == 4
        policy.first_token(0.1, home, request)
        assert (policy._prefill, policy._in_use(home, (1, 2, 9))) == ([0, 0], 4)
        policy.finished(0.2, home, request)
        assert policy._in_use(home, (1, 2, 9)) == 3

    def test_no_credit_beyond_the_prompt(self):
        policy = DynamoLike(fleet_of(), 0)
        policy.stored(0, Tier.GPU, [1])
        policy._prefill = [-500, 0]
        assert choose(policy, ask((1,), tail=0)) == [0]
        assert policy._prefill[0] == 0


class TestMinTtft:
    def test_who_answers_first(self):
        policy = MinTtft(fleet_of(), 0)
        assert policy.choose(0.0, ask((1, 2)), [Telling(0.2, 0, 1), Telling(0.1, 200, 9)]) == (1, 200)

    def test_ties_go_to_whom_holds_least(self):
        policy = MinTtft(fleet_of(), 0)
        assert policy.choose(0.0, ask((1, 2)), [Telling(0.1, 0, 3), Telling(0.1, 0, 2)]) == (1, 0)
